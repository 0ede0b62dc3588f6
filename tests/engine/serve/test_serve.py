"""Serving with a real engine and real ports."""

from __future__ import annotations

import dataclasses
import json
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

import docker.errors
import httpx
import pytest
from certificates import certificate
from heard import heard
from watched import free_port

from sparkpin.cli import serve as clients
from sparkpin.core.errors import BusyError, InputError, SmokeError
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.releases.container import HOME_LABEL
from sparkpin.releases.record import Release, Releases
from sparkpin.serve import served as services
from sparkpin.serve import service, status
from sparkpin.serve.address import Address, AddressOptions, Limits

if TYPE_CHECKING:
    from fake_release import FakeSite, Standing  # pytest loads it itself, below

pytest_plugins = ["fake_release"]


@pytest.fixture
def name(paths: Paths) -> str:
    return services.name_of(paths, "fake")


def test_a_release_is_served_on_this_machine_only(standing: Standing, fake_engine: Engine) -> None:
    served, port = standing.served, standing.served.address.port
    assert served.url == f"http://127.0.0.1:{port}/v1" and served.ready and served.server.status == "running"
    assert served.release == standing.release.tag and served.model == "scripted-tiny"
    answer = httpx.post(f"{served.url}/completions", json={"prompt": "x"}, trust_env=False, timeout=60)
    assert answer.json()["choices"][0]["text"].startswith(" a pinned build")
    container = fake_engine.client.containers.get(served.container)
    host = container.attrs["HostConfig"]
    assert container.ports == {} and host["NetworkMode"] == "none"
    assert b'"model_writable": false' in container.logs() and b'"home_writable": true' in container.logs()
    front = fake_engine.client.containers.get(served.container + services.PROXY)
    assert front.ports == {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(port)}]}
    for part in (container, front):
        host = part.attrs["HostConfig"]
        assert host["RestartPolicy"] == {"Name": "on-failure", "MaximumRetryCount": 0}
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"]
        assert host["SecurityOpt"] == ["no-new-privileges:true"] and host["LogConfig"]["Config"]["max-file"] == "3"
        assert part.attrs["Config"]["User"] == "10001:10001"


def test_a_client_is_told_what_the_server_itself_says(standing: Standing) -> None:
    """Its command line has no length, and its recipe is nowhere."""
    Releases(standing.paths).save(standing.release)
    facts = clients.facts_of_server(standing.paths, None)
    assert facts.url == standing.served.url and facts.model == "scripted-tiny"
    assert (facts.context, facts.output) == (2048, 512) and facts.input == ("text",)
    with pytest.raises(InputError):
        clients.facts_of_server(standing.paths, "another")


def test_serving_it_again_leaves_it_alone(standing: Standing, fake_engine: Engine) -> None:
    name, said = standing.served.container, heard()
    before = fake_engine.client.containers.get(name).id
    service.start(standing.paths, fake_engine, standing.release, standing.checkpoint)
    assert said == [f"{standing.release.tag} already runs as {name}"], "what its log said as it started is no news"
    assert fake_engine.client.containers.get(name).id == before


def test_another_port_or_release_replaces_it(site: FakeSite, name: str, newer: Release) -> None:
    site.start(port=site.port)
    other = free_port()
    moved = site.start(port=other)
    assert moved.address.port == other and moved.ready
    served = site.start(newer)
    assert served.release == newer.tag and served.ready
    assert served.address.port == other, "it keeps the address of what ran"
    assert [s.container for s in services.status(site.engine) if s.home == str(site.paths.home)] == [name]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", site.port))  # the former port is free again


def test_another_address_is_another_proxy_and_the_same_server(site: FakeSite, name: str, tmp_path: Path) -> None:
    """With a certificate, whose key nobody is shown; kept until something else is said."""
    cert, key = certificate(tmp_path / "own")
    plain = site.start(port=site.port)
    with pytest.raises(InputError, match="--tls-cert"):
        site.start(tls_cert=key, tls_key=cert)
    assert site.start() == plain
    served = site.start(port=free_port(), tls_cert=cert, tls_key=key, allow="/score", limit="requests=9")
    port = served.address.port
    assert (served.started, served.url) == (plain.started, f"https://127.0.0.1:{port}/v1") and served.ready
    with httpx.Client(trust_env=False, verify=ssl.create_default_context(cafile=cert), timeout=60) as client:
        assert client.post(f"{served.url}/completions", json={"prompt": "x"}).status_code == 200
        assert client.post(f"{served.url}/completions/", json={"prompt": "x"}).status_code == 404
    front = site.engine.client.containers.get(name + services.PROXY)
    secret = Path(key).read_text().splitlines()[1]
    assert secret not in json.dumps(front.attrs) and secret.encode() not in front.logs()
    assert site.start() == served
    address = services.read(site.paths.home, "fake").address
    assert address is not None and (address.allow, address.limits.requests, address.cert) == (("/score",), 9, cert)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", site.port))  # the former port is free again
    assert site.start(tls_cert="none").url == f"http://127.0.0.1:{port}/v1"
    wider = site.start(host="0.0.0.0")  # on the port that the former proxy has
    assert (wider.address.port, wider.started) == (port, plain.started) and wider.ready


def test_a_release_that_does_not_start_gives_way_to_the_former_one(site: FakeSite, name: str, newer: Release) -> None:
    site.start(port=site.port)
    said = heard()
    bad = dataclasses.replace(newer, env={"FAKE_VLLM": "exit"})
    with pytest.raises(SmokeError, match=r"exited with 1\nfirst error: RuntimeError: no such architecture") as caught:
        site.start(bad, port=site.port)
    assert newer.tag in str(caught.value)
    assert said[-1] == f"starting {site.release.tag} again"
    assert site.engine.client.containers.get(name).labels["sparkpin.release"] == site.release.tag
    served = site.start(port=site.port)
    assert served.ready and [
        c.name for c in services.services(site.engine) if c.labels[HOME_LABEL] == str(site.paths.home)
    ] == [name]
    kept = site.paths.home / "serve/fake" / newer.name
    assert "no such architecture" in (kept / "server.log").read_text()
    assert "first error: RuntimeError: no such architecture" in (kept / "post-mortem.txt").read_text()


def test_a_first_release_that_does_not_start_leaves_nothing(site: FakeSite, name: str) -> None:
    with pytest.raises(SmokeError):
        site.start(site.faulty("exit"), port=site.port)
    assert not site.containers()
    with pytest.raises(docker.errors.NotFound):
        site.engine.client.volumes.get(name)


def test_a_taken_port_does_not_end_what_is_served(standing: Standing, fake_engine: Engine, newer: Release) -> None:
    paths = standing.paths
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(BusyError):
            service.start(
                paths,
                fake_engine,
                newer,
                standing.checkpoint,
                options=AddressOptions(holder.getsockname()[1]),
            )
    (served,) = (s for s in services.status(fake_engine) if s.home == str(paths.home))
    assert served.ready and served.release == standing.release.tag


def test_homes_on_one_engine_serve_side_by_side_until_each_is_stopped(
    standing: Standing, site: FakeSite, name: str, newer: Release
) -> None:
    first, paths, engine = standing.served, site.paths, site.engine
    with pytest.raises(BusyError) as caught:
        site.start(newer, port=first.address.port)
    assert f"the container {first.container}-proxy, a server of the home {first.home}" in caught.value.message
    assert f"SPARKPIN_HOME={first.home} invoke stop" in caught.value.next_step
    said = heard()
    site.start(newer, port=site.port)
    assert not [line for line in said if "stopping" in line]
    both = {(served.home, served.release, served.address.port) for served in services.status(engine) if served.ready}
    assert {(first.home, first.release, first.address.port), (str(paths.home), newer.tag, site.port)} <= both
    assert service.stop(paths, engine, "fake") == (name,)
    assert not [served for served in services.status(engine) if served.home == str(paths.home)]
    assert service.stop(paths, engine, None) == ()
    with pytest.raises(InputError, match="no service of recipe 'fake' runs"):
        service.stop(paths, engine, "fake")
    assert services.running_release(standing.paths, engine, "fake") == first.release


def test_stop_keeps_the_address(site: FakeSite) -> None:
    served = site.start(port=site.port, allow="/sleep", limit="requests=9")
    service.stop(site.paths, site.engine, None)
    said = heard()
    again = site.start()
    kept = Address(port=served.address.port, allow=("/sleep",), limits=Limits(requests=9))
    assert again.address == kept
    assert [line for line in said if "before `invoke stop`" in line]
    assert [line for line in said if line.startswith("warning: --allow /sleep")]
    closed = site.start(allow="none", limit="none")
    assert (closed.address.allow, closed.address.limits) == ((), Limits())
    site.engine.client.containers.get(closed.container + services.PROXY).remove(force=True)
    assert site.start().address.allow == (), "an older address would open what is closed since"


@pytest.mark.parametrize("record", [None, '{"orders": 3}'])
def test_a_server_without_a_record_is_not_replaced_until_it_is_stopped(
    site: FakeSite, newer: Release, record: str | None
) -> None:
    """Nobody could go back to it."""
    served, path = site.start(port=site.port), services.record_path(site.paths.home, "fake")
    path.write_text(record) if record else path.unlink()
    (now,) = [one for one in services.status(site.engine) if one.container == served.container]
    assert now.url == served.url
    with pytest.raises(InputError):
        site.start(newer)
    assert services.running_release(site.paths, site.engine, "fake") == served.release
    assert service.stop(site.paths, site.engine, None) == (served.container,)
    path.unlink(missing_ok=True)
    assert site.start(newer, port=site.port).ready


def test_the_half_that_is_down_is_named(site: FakeSite) -> None:
    served = site.start(port=site.port)
    server, front = (site.engine.client.containers.get(served.container + end) for end in ("", services.PROXY))
    front.kill()
    (now,) = [one for one in services.status(site.engine) if one.container == served.container]
    assert not now.ready and status.state_of(now).startswith("the proxy is exited")
    front.start()
    server.kill()
    server.reload()
    assert status.state_of(services.describe(site.engine, server)).startswith("the server ")
