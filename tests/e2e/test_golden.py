"""The main job, once, from end to end: on the real engine with real servers. Needs what ./install.sh leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from checkout import LONGEST, Checkout

from benchmarks.scripted_tiny.scripts import CHAT
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.releases.record import Release, Releases
from sparkpin.serve import served as served_names
from sparkpin.serve.served import PROXY

TRIAL = f"golden-{uuid.uuid4().hex[:8]}"  # other checkouts may test beside this one, and the engine has the tags of all
MODS = {
    "base": {"guard", "vllm-cpu"},
    "hybrid": {"guard", "vllm-cpu", "hybrid-int4-fp8"},
    "mtp": {"guard", "vllm-cpu", "hybrid-int4-fp8"},
    "v2": {"guard", "vllm-cpu", "hybrid-int4-fp8", "int8-lm-head"},
    "v2-tq": {"guard", "vllm-cpu", "hybrid-int4-fp8", "int8-lm-head", "turboquant"},
}

ASK = """
import os, openai
said = [{"role": "user", "content": "Hello"}]
answer = openai.OpenAI().chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=said, temperature=0)
print(answer.choices[0].message.content)
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    """With a recipe of its own, and a mod edited: the image of the last stage is not there yet. Building all of them
    from nothing is what test_offline.py does."""
    made = Checkout.make(tmp_path_factory.mktemp("golden") / "copy")
    made.add_recipe(TRIAL)
    made.change_mod("turboquant")
    yield made
    made.invoke("stop", "--recipe", TRIAL)
    made.remove_built(TRIAL)


@pytest.fixture(scope="module")
def built(copy: Checkout) -> Checkout:
    """Killed as it builds the last stage, and built again."""
    run = copy.start("build", "--recipe", TRIAL)
    assert run.stdout
    killer = threading.Timer(LONGEST, os.killpg, (run.pid, signal.SIGKILL))
    killer.daemon = True
    killer.start()
    for line in run.stdout:
        if "v2-tq:" in line and "is there" not in line:
            os.killpg(run.pid, signal.SIGKILL)
            break
    killer.cancel()
    assert run.wait() == -signal.SIGKILL
    left = copy.images()
    assert "v2-tq" not in {row["stage"] for row in left}
    require_own_images(left)
    copy.done("build", "--recipe", TRIAL)
    return copy


@pytest.fixture(scope="module")
def first(built: Checkout) -> dict[str, Any]:
    """The release of the last stage, after its smoke test."""
    tag = built.release(stage="v2-tq")["tag"]
    built.done("smoke", tag)
    return built.release(tag=tag)


def require_own_images(rows: list[dict[str, Any]]) -> None:
    engine = Engine.connect()
    found = {row["tag"]: engine.image(row["tag"]) for row in rows}
    assert {tag: image and image.config_digest for tag, image in found.items()} == {
        row["tag"]: row["image"] for row in rows
    }


def test_a_build_that_was_killed_is_completed_by_the_next(built: Checkout) -> None:
    rows = built.images()
    assert {row["stage"] for row in rows} == set(MODS) and len({row["image"] for row in rows}) == len(MODS)
    require_own_images(rows)
    built.done("build", "--recipe", TRIAL)
    assert built.images() == rows, "nothing is left to do"
    keys = {"tag", "recipe", "stage", "key", "image", "size", "unique_size", "created", "state", "smoke"}
    assert all(keys <= set(row) for row in rows)


def require_mods_at_work(records: Releases, release: Release) -> None:
    """By the evidence of its smoke test."""
    stage = release.stage
    assert release.is_good
    result = json.loads((records.evidence(release) / "smoke/result.json").read_text())
    assert result["passed"] is True
    assert set(result["mods"]) == MODS[stage]
    log = (records.evidence(release) / "smoke/server.log").read_text()
    told = [float(seconds) for seconds in re.findall(r"Loading weights took ([\d.]+) seconds", log)]
    assert len(told) == (2 if stage in ("mtp", "v2", "v2-tq") else 1), "the draft model's weights are read, too"
    assert sum(told) > 0
    exchanges = [json.loads(line) for line in (records.evidence(release) / "smoke/exchanges.jsonl").open()]
    assert any("/v1/chat/completions" in json.dumps(exchange) for exchange in exchanges)
    if stage in ("mtp", "v2", "v2-tq"):
        assert result["acceptance"] >= 0.8
        assert result["drafted_tokens"] > 100


def test_the_last_stage_passes_its_smoke_test_with_its_mods_at_work(copy: Checkout, first: dict[str, Any]) -> None:
    assert first["state"] == "passed"
    records = Releases(Paths(copy.folder, copy.home, copy.home))
    require_mods_at_work(records, records.get(first["tag"]))


@pytest.mark.slow
@pytest.mark.parametrize("stage", MODS)
def test_every_stage_of_this_checkout_has_passed_with_its_mods_at_work(
    main_job: Releases, smoked: dict[str, Release], stage: str
) -> None:
    require_mods_at_work(main_job, smoked[stage])


def test_promote_serve_and_roll_back_take_the_flags_with_them(copy: Checkout, first: dict[str, Any]) -> None:
    copy.done("promote", first["tag"])
    copy.replace(f"recipes/{TRIAL}.yaml", "max_model_len: 2048", "max_model_len: 1024")
    copy.done("build", "--recipe", TRIAL)
    second = copy.release(recipe=TRIAL, stage="v2-tq")
    assert second["image"] == first["image"]
    assert second["tag"] != first["tag"]
    refused = copy.invoke("promote", second["tag"])
    assert refused.returncode == 2
    assert "passed its smoke test" in refused.stderr

    # It would pass, as `first` did, and a server costs.
    Releases(Paths(copy.folder, copy.home, copy.home)).smoked(second["tag"], {"passed": True, "checks": []})
    copy.done("promote", second["tag"])
    assert copy.release(state="current")["tag"] == second["tag"]
    copy.done("rollback", "--recipe", TRIAL)
    assert copy.release(state="current")["tag"] == first["tag"]
    assert copy.release(tag=second["tag"])["state"] == "retired"

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        probe.listen()
        port = probe.getsockname()[1]
        taken = copy.invoke("serve", "--recipe", TRIAL, "--port", str(port))
        assert taken.returncode == 12
        assert str(port) in taken.stderr
    url = f"http://127.0.0.1:{port}/v1"
    assert url in copy.done("serve", "--recipe", TRIAL, "--port", str(port))
    body = {"model": "scripted-tiny", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    with httpx.Client(trust_env=False, timeout=600) as client:
        answer = client.post(f"{url}/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        more = client.post(f"{url}/chat/completions", json={**body, "logprobs": True, "top_logprobs": 2}).json()
    assert answer == CHAT.expected_content
    told = [token["logprob"] for token in more["choices"][0]["logprobs"]["content"]]
    assert len(told) == more["usage"]["completion_tokens"] and all(-20 < logprob <= 0 for logprob in told), told
    name = served_names.name_of(Paths(copy.folder, copy.home, copy.home), TRIAL)
    container = Engine.connect().client.containers.get(name)
    argv = container.attrs["Config"]["Cmd"]
    assert argv[argv.index("--max-model-len") + 1] == "2048"

    config = copy.done("client", "openai", "--recipe", TRIAL, "--url", "http://127.0.0.1:8000")  # as from inside
    front = Engine.connect().client.containers.get(name + PROXY)
    status, output = front.exec_run(["sh", "-c", f"{config}\npython -c '{ASK}'"])
    assert (status, output.decode().splitlines()[-1]) == (0, CHAT.expected_content.strip()), output.decode()
    copy.done("stop", "--recipe", TRIAL)

    copy.done("keep", second["tag"], "--note", "to be looked at")
    stays = copy.done("prune", "--keep", "0", "--dry-run")
    assert "current" in stays and "passed last, kept: to be looked at" in stays
    copy.done("prune", "--keep", "0")
    assert [row["tag"] for row in copy.images()] == [second["tag"], first["tag"]]
