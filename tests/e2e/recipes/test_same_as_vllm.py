"""The parser that is made of a vLLM's data takes and refuses what the parser of the vLLM in the image does."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from checkout import PROJECT
from in_container import output_of
from places import SUPPORT

from sparkpin.build.pair import pair
from sparkpin.host.engine import Engine
from sparkpin.pins.vllm_flags import parse_flags
from sparkpin.recipes.vllm_parser import Refused, VllmParser, parser_of

SCRIPT = SUPPORT / "vllm_flags.py"
ASKED = 1200  # of the forms, always the same ones: all 4,400 take vLLM four minutes
VALUES = ("1", "1k", "0.5", "auto", "None", '{"nope": 1}')
PARTS = (1, "x", None, [1])
ELSEWHERE = ("--config", "--lora-modules")  # vLLM's own parser reads their files
TOGETHER = (  # fields that vLLM judges by others, or by Python's types
    "ec_connector", "kv_connector", "manager_config", "backend_per_kind", "rms_norm", "fused_add_rms_norm",
    "gelu_and_mul_sparse", "torch_profiler_dir", "proton_profiler_dir", "proton_mode", "proton_graph_attribution",
    "capture_torch_profiler", "linear", "moe", "targets", "disable_additional_properties", "disable_any_whitespace",
)  # fmt: skip


def forms_of(parser: VllmParser) -> list[list[str]]:
    forms = [["-O3"], ["-O", "2"], ["-O=1"], ["-Ox"], ["-tp", "2"], ["-cc.mode=3"], ["-cc.mode"], ["--nope"], ["b/c"]]
    for name, entry in parser.flags.items():
        if name in ELSEWHERE:
            continue
        forms += [[name, value] for value in VALUES] + [[name, str(one)] for one in entry.get("choices", ())[:1]]
        forms += [[name], [name, "1", "2"], [f"--no-{name[2:]}"], [f"{name}.a", "1"], [name[:-1], "1"]]
        forms += [[f"--{name[2:].replace('-', '_')}=1"], *([other, "1"] for other in entry.get("also", ()))]
        fields = parser.configs[entry["config"]].keys() - {*TOGETHER} if entry.get("type") == "config" else ()
        forms += [[name, json.dumps({field: part})] for field in sorted(fields) for part in PARTS]
    return random.Random(ASKED).sample(forms, ASKED)


def is_taken(parser: VllmParser, form: list[str]) -> bool:
    head, flags = parse_flags(form)
    if head:
        return False
    try:
        parser.parsed(flags)
    except Refused:
        return False
    return True


@pytest.mark.slow
def test_what_is_taken_and_refused_is_so_by_the_parser_in_the_image(tmp_path: Path) -> None:
    base = pair(PROJECT, "scripted-tiny")[0]
    parser = parser_of(base.stack.vllm)
    forms = forms_of(parser)
    (tmp_path / "forms.json").write_text(json.dumps(forms))
    log = output_of(
        Engine.connect(),
        base.rendered.ref,
        ["python", "/flags.py"],
        volumes={
            str(SCRIPT): {"bind": "/flags.py", "mode": "ro"},
            str(tmp_path / "forms.json"): {"bind": "/forms.json", "mode": "ro"},
        },
        environment={"PYTHONDONTWRITEBYTECODE": "1"},
        tmpfs={"/tmp": "", "/home/sparkpin": "uid=10001"},
    )
    line = next(line for line in log.splitlines() if line.startswith("TAKEN "))
    real = json.loads(line.removeprefix("TAKEN "))
    assert parser.version == parser.wanted and min(real.count(True), real.count(False)) > 300
    differ = [form for form, taken in zip(forms, real, strict=True) if is_taken(parser, form) != taken]
    assert differ == []
