"""The main job on the real engine with real servers. Needs what ./install.sh leaves."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkout import LONGEST, PROJECT, Checkout

from sparkpin.core.paths import Paths
from sparkpin.fetch.tinymodel.scripts import CHAT
from sparkpin.host.engine import Engine
from sparkpin.releases.record import Releases
from sparkpin.serve import service

TRIAL = f"trial-{uuid.uuid4().hex[:8]}"  # other checkouts may test beside this one, and the engine has the tags of all
STAGES = ["base", "hybrid", "mtp", "v2", "v2-tq"]
MODS = {
    "base": {"vllm-cpu"},
    "hybrid": {"vllm-cpu", "hybrid-int4-fp8"},
    "mtp": {"vllm-cpu", "hybrid-int4-fp8"},
    "v2": {"vllm-cpu", "hybrid-int4-fp8", "int8-lm-head"},
    "v2-tq": {"vllm-cpu", "hybrid-int4-fp8", "int8-lm-head", "turboquant"},
}
ASK = """
import os, openai
said = [{"role": "user", "content": "Hello"}]
answer = openai.OpenAI().chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=said, temperature=0)
print(answer.choices[0].message.content)
"""


@pytest.fixture(scope="module")
def main_job() -> Releases:
    """What `./install.sh` leaves: the releases of the pins of this checkout."""
    subprocess.run([".venv/bin/invoke", "up"], cwd=PROJECT, check=True)
    return Releases(Paths.from_env(PROJECT))


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Checkout]:
    made = Checkout.make(tmp_path / "copy")
    yield made
    made.invoke("stop", "--recipe", TRIAL)
    made.remove_tags(TRIAL)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_passed_its_smoke_test_with_its_mods_at_work(main_job: Releases, stage: str) -> None:
    release = [release for release in main_job.of_recipe("scripted-tiny") if release.stage == stage][-1]
    assert release.is_good
    result = json.loads((main_job.evidence(release) / "smoke/result.json").read_text())
    assert result["passed"] is True
    assert set(result["mods"]) == MODS[stage]
    log = (main_job.evidence(release) / "smoke/server.log").read_text()
    told = [float(seconds) for seconds in re.findall(r"Loading weights took ([\d.]+) seconds", log)]
    assert len(told) == (2 if stage in ("mtp", "v2", "v2-tq") else 1), "the draft model's weights are read, too"
    assert result["load_format"] == "auto" and result["weights_seconds"] == pytest.approx(sum(told)) and sum(told) > 0
    exchanges = [json.loads(line) for line in (main_job.evidence(release) / "smoke/exchanges.jsonl").open()]
    assert any("/v1/chat/completions" in json.dumps(exchange) for exchange in exchanges)
    if stage in ("mtp", "v2", "v2-tq"):
        assert result["acceptance"] >= 0.8
        assert result["drafted_tokens"] > 100


def test_the_list_for_machines_has_the_promised_keys(main_job: Releases) -> None:
    text = subprocess.run(
        [".venv/bin/invoke", "images", "--json"], cwd=PROJECT, capture_output=True, text=True, check=True
    ).stdout
    keys = {"tag", "recipe", "stage", "key", "image", "size", "unique_size", "created", "state", "smoke"}
    assert all(keys <= set(row) for row in json.loads(text))


def test_a_second_build_does_nothing(main_job: Releases) -> None:
    before = [release.created for release in main_job.all()]
    subprocess.run([".venv/bin/invoke", "build", "--stage", "v2-tq"], cwd=PROJECT, check=True)
    assert [release.created for release in main_job.all()] == before


def ask(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)


def test_promote_serve_and_roll_back_take_the_flags_with_them(main_job: Releases, copy: Checkout) -> None:
    copy.add_recipe(TRIAL, **{"stage: v2-tq": "stage: base"})
    copy.done("build", "--recipe", TRIAL)
    copy.done("smoke")
    first = copy.release(recipe=TRIAL)
    copy.done("promote", first["tag"])
    copy.replace(f"recipes/{TRIAL}.yaml", "max_model_len: 2048", "max_model_len: 1024")
    copy.done("build", "--recipe", TRIAL)
    second = copy.release(recipe=TRIAL)
    assert second["image"] == first["image"]
    assert second["tag"] != first["tag"]
    refused = copy.invoke("promote", second["tag"])
    assert refused.returncode == 2
    assert "passed its smoke test" in refused.stderr

    copy.done("smoke", second["tag"])
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
    served = copy.done("serve", "--recipe", TRIAL, "--port", str(port))
    assert f"http://127.0.0.1:{port}/v1" in served
    body = {"model": "scripted-tiny", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    answer = ask(f"http://127.0.0.1:{port}/v1/chat/completions", body)["choices"][0]["message"]["content"]
    assert answer == CHAT.expected_content
    more = ask(f"http://127.0.0.1:{port}/v1/chat/completions", {**body, "logprobs": True, "top_logprobs": 2})
    told = [token["logprob"] for token in more["choices"][0]["logprobs"]["content"]]
    assert len(told) == more["usage"]["completion_tokens"] and all(-20 < logprob <= 0 for logprob in told), told
    name = service.name_of(Paths(copy.folder, copy.home, copy.home), TRIAL)
    container = Engine.connect().client.containers.get(name)
    argv = container.attrs["Config"]["Cmd"]
    assert argv[argv.index("--max-model-len") + 1] == "2048"

    told = json.loads(copy.done("client", "opencode"))["provider"]["sparkpin"]
    assert told["options"]["baseURL"] == f"http://127.0.0.1:{port}/v1"
    assert told["models"]["scripted-tiny"]["limit"] == {"context": 2048, "output": 512}
    config = copy.done("client", "openai", "--recipe", TRIAL, "--url", "http://127.0.0.1:8000")  # as from inside
    status, output = container.exec_run(["sh", "-c", f"{config}\npython -c '{ASK}'"])
    assert (status, output.decode().splitlines()[-1]) == (0, CHAT.expected_content.strip()), output.decode()
    copy.done("stop", "--recipe", TRIAL)

    copy.done("keep", second["tag"], "--note", "to be looked at")
    stays = copy.done("prune", "--keep", "0", "--dry-run")
    assert "current" in stays and "passed last, pinned: to be looked at" in stays
    copy.done("prune", "--keep", "0")
    assert [row["tag"] for row in copy.images()] == [second["tag"], first["tag"]]


def test_a_mod_that_is_not_at_work_fails_the_smoke_test(main_job: Releases, copy: Checkout) -> None:
    copy.add_recipe(TRIAL, **{"stage: v2-tq": "stage: v2"})
    copy.replace("stages/v2.yaml", "smoke:", "serve: {env: {SPARKPIN_MOD_INT8_LM_HEAD: 0}}\nsmoke:")
    copy.done("build", "--recipe", TRIAL)
    tag = copy.release(stage="v2")["tag"]
    result = copy.invoke("smoke", tag)
    assert result.returncode == 10
    assert "int8-lm-head" in result.stdout
    row = copy.release(tag=tag)
    assert row["state"] == "failed"
    assert Engine.connect().image(tag) is not None
    assert copy.invoke("promote", tag).returncode == 2


def test_a_head_stored_in_int8_serves_with_the_mod_and_does_not_without(main_job: Releases, copy: Checkout) -> None:
    copy.add_recipe("trial", **{"stage: v2-tq": "stage: v2-stored"})
    copy.replace("stages/v2-stored.yaml", "acceptance_floor: 0.8", "acceptance_floor: 0.8\n  draft_lengths: [1]")
    copy.done("build", "--recipe", "trial")
    tag = copy.release(stage="v2-stored")["tag"]
    copy.done("smoke", tag)
    evidence = copy.home / "releases/trial" / tag.partition(":")[2] / "smoke"
    result = json.loads((evidence / "result.json").read_text())
    assert result["acceptance"] >= 0.8 and result["drafted_tokens"] > 100
    active = [line for line in (evidence / "server.log").read_text().splitlines() if '"mod":"int8-lm-head"' in line]
    assert [("stored" in line, "shared" in line) for line in active] == [(True, False), (True, True)]
    verdicts = {check["name"]: check["detail"] for check in result["checks"]}
    assert verdicts["chat@1"] == verdicts["chat"] == "24 tokens, exact", "with another number of drafted tokens"
    shares = [verdicts[name].partition("; by position ")[2].count("%") for name in ("acceptance", "acceptance@1")]
    assert shares == [2, 1] and (evidence / "exchanges-drafts-1.jsonl").stat().st_size > 1000

    copy.replace("stages/v2-stored.yaml", "smoke:", "serve: {env: {SPARKPIN_MOD_INT8_LM_HEAD: 0}}\nsmoke:")
    copy.done("build", "--recipe", "trial")
    tag = copy.release(stage="v2-stored")["tag"]
    assert copy.invoke("smoke", tag).returncode == 10
    log = (copy.home / "releases/trial" / tag.partition(":")[2] / "smoke/server.log").read_text()
    assert "There is no module or parameter named 'lm_head.weight_" in log


def change_one_mod(copy: Checkout, text: str) -> None:
    init = copy.folder / "mods/turboquant/sparkpin_turboquant/__init__.py"
    init.write_text(f"{init.read_text()}\n# {text}\n")


def test_two_builds_at_once_both_complete_with_one_image(main_job: Releases, copy: Checkout) -> None:
    copy.add_recipe(TRIAL)
    change_one_mod(copy, f"two at once {time.time_ns()}")
    runs = [copy.start("build", "--recipe", TRIAL) for _ in range(2)]
    outputs = [run.communicate(timeout=LONGEST)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(outputs)
    assert len([row for row in copy.images() if row["stage"] == "v2-tq"]) == 1


def test_a_build_that_was_killed_is_completed_by_the_next(main_job: Releases, copy: Checkout) -> None:
    copy.add_recipe(TRIAL)
    change_one_mod(copy, f"killed {time.time_ns()}")
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
    assert not [row for row in copy.images() if row["stage"] == "v2-tq"]
    copy.done("build", "--recipe", TRIAL)
    row = copy.release(stage="v2-tq")
    image = Engine.connect().image(row["tag"])
    assert image is not None
    assert image.config_digest == row["image"]


def test_a_full_disk_stops_a_fetch_with_one_clear_error(copy: Checkout, tmpfs: Callable[[str], Path]) -> None:
    small = tmpfs("2m")
    result = copy.invoke("fetch", SPARKPIN_CACHE=str(small))
    assert result.returncode == 11, result.stderr
    assert str(small) in result.stderr
    assert "Traceback" not in result.stderr


def smallest_wheel(copy: Checkout) -> dict[str, Any]:
    lock = json.loads((copy.folder / "pins/stacks/cpu.lock").read_text())
    wheel = min(lock["wheels"], key=lambda row: row["size"])
    assert isinstance(wheel, dict)
    return wheel


def test_a_wheel_with_one_byte_changed_is_told_and_fetched_again(
    main_job: Releases, copy: Checkout, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    subprocess.run(["cp", "--archive", "--link", main_job.paths.store, tmp_path / "store"], check=True)
    cache.mkdir()
    (tmp_path / "store").rename(cache / "store")
    wheel = smallest_wheel(copy)
    stored = cache / "store" / wheel["sha256"][:2] / wheel["sha256"]
    data = bytearray(stored.read_bytes())
    data[len(data) // 2] ^= 1
    stored.unlink()  # the link to the real store
    stored.write_bytes(data)
    result = copy.invoke("fetch", SPARKPIN_CACHE=str(cache))
    assert result.returncode == 0, result.stderr
    assert f"{wheel['file']}) is damaged (sha256 " in result.stderr
    assert hashlib.sha256(stored.read_bytes()).hexdigest() == wheel["sha256"]


def test_a_lock_with_a_wrong_hash_is_refused_and_nothing_of_that_file_is_kept(
    main_job: Releases, copy: Checkout
) -> None:
    wrong = hashlib.sha256(b"other bytes").hexdigest()
    copy.replace("pins/stacks/cpu.lock", smallest_wheel(copy)["sha256"], wrong)
    result = copy.invoke("fetch")
    assert result.returncode == 5, result.stderr
    assert wrong in result.stderr
    assert not list(main_job.paths.store.glob(f"*/{wrong}"))


def test_doctor_finds_nothing_missing_after_the_main_job(main_job: Releases, copy: Checkout) -> None:
    text = copy.done("doctor")
    assert "mmdebstrap" in text
    assert "MISSING" not in text


def test_the_plan_of_a_checkpoint_is_printed_and_nothing_is_made(main_job: Releases, copy: Checkout) -> None:
    text = copy.done("checkpoint", "--stage", "mtp", "--dry-run")
    assert "shared_expert" in text
    assert "mtp" in text
    assert not (copy.home / "checkpoints").exists()
