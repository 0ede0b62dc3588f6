"""pins/known_issues.yaml: each entry is found where all of its conditions hold, and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from places import PROJECT

from sparkpin.core.errors import ManifestError
from sparkpin.pins import manifests
from sparkpin.pins.schema import KnownIssue
from sparkpin.recipes import rules
from sparkpin.recipes.rules import COMPARISON, OR, PlannedServer, fits
from sparkpin.recipes.vllm_parser import VllmParser, parser_of

ISSUES = {issue.name: issue for issue in manifests.load_known_issues(PROJECT)}
OF_MACHINES = {name for name, issue in ISSUES.items() if {"kernel", "driver", "memory"} & issue.when.keys()}
VERSIONS = ("0.33.0", "0.32.0")
NEWEST = parser_of(VERSIONS[0])
HARMLESS = (
    "--moe-backend", "x", "--max-num-seqs", "1", "--gpu-memory-utilization", "0.8",
    "--mamba-ssm-cache-dtype", "float16", "--nnodes", "2",
)  # fmt: skip
STACKS = {True: manifests.load_stack(PROJECT, "spark"), False: manifests.load_stack(PROJECT, "cpu")}
NUMBERS = {">": 1, ">=": 0, "<": -1, "<=": 0}


@dataclass(frozen=True)
class PackedServer(PlannedServer):
    """One whose image has this vLLM and these packages, whatever its stack has."""

    parser: VllmParser = NEWEST
    packages: frozenset[str] | None = frozenset()


def meets(condition: str) -> str:
    """A value that fits a condition."""
    condition = condition.removeprefix(OR)
    if found := COMPARISON.fullmatch(condition):
        return f"{float(found[2]) + NUMBERS[found[1]]:g}"
    return "" if condition == "set" else condition.replace("*", "")


def server(issue: KnownIssue) -> PlannedServer:
    """One that has the issue."""
    said = {name: meets(condition) for name, condition in issue.when.items() if condition != "unset"}
    words = [word for name, value in said.items() if name.startswith("-") for word in (name, value) if word]
    version = next(one for one in VERSIONS if not issue.vllm or one in SpecifierSet(issue.vllm))
    return PackedServer(
        project=PROJECT,
        model="someone/Qwen3.6-1B-" + (issue.models or [""])[0].replace("*", ""),
        argv=("vllm", "serve", "/model", *words),
        env={name.replace("*", ""): value for name, value in said.items() if not name.startswith("-")},
        stack=STACKS[issue.gpu is not False],
        mods=(),
        chain=(),
        parser=parser_of(version),
    )


def names(served: PlannedServer) -> set[str]:
    return {issue.name for issue in ISSUES.values() if rules.applies(issue, served)}


@pytest.mark.parametrize("name", sorted(ISSUES.keys() - OF_MACHINES))
def test_it_is_found_where_all_conditions_hold_and_not_where_one_fails(name: str) -> None:
    issue = ISSUES[name]
    served = server(issue)
    assert name in names(served), served
    found = {one.text: one.severity for one in rules.of_known_issues(served) if one.hint == issue.do}
    text = rules.sentence(issue, served.setting).replace(name_of := next(iter(issue.when)), name_of.replace("*", ""), 1)
    assert found[text] == issue.severity
    assert all(one.source.rpartition("/")[2] in text for one in issue.evidence if "vllm-project/vllm#" in one.source)
    elsewhere = [replace(served, argv=("vllm", "serve", "/model", *HARMLESS), env={"VLLM_DISABLED_KERNELS": "x"})]
    if all(condition.startswith((OR, "unset")) for condition in issue.when.values()):
        assert name in names(replace(served, argv=("vllm", "serve", "/model")))
    if issue.gpu is not None:
        elsewhere.append(replace(served, stack=STACKS[not issue.gpu]))
    if issue.hybrid or issue.models:
        elsewhere.append(replace(served, model="meta/Llama-4"))
    if issue.lacks:
        elsewhere += [replace(served, packages=frozenset({issue.lacks})), replace(served, packages=None)]
    if issue.vllm:
        elsewhere.append(replace(served, parser=replace(served.parser, wanted="")))
        elsewhere += [replace(served, parser=parser_of(one)) for one in VERSIONS if one not in SpecifierSet(issue.vllm)]
    assert not any(name in names(one) for one in elsewhere)


def test_a_variable_of_vllm_is_no_forks_and_a_package_brings_its_values() -> None:
    served = replace(server(ISSUES["tables-on-disk"]), env={"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"})
    assert "tables-on-disk" not in names(served)
    b12x = ("--quantization", "b12x_fp6", "--moe-backend", "b12x", "--attention-backend", "B12X")
    served = replace(served, argv=("vllm", "serve", "/model", *b12x))
    packed = replace(served, packages=frozenset({"b12x"}))
    found = {True: rules.findings(packed), False: rules.findings(served)}
    assert [sum(one.severity == "error" for one in found[has]) for has in (True, False)] == [0, 3]


def test_of_machines() -> None:
    assert {"kernel-7", "driver-590", "small-spark"} == OF_MACHINES
    assert not names(server(ISSUES["memory-share"])) & OF_MACHINES  # a recipe says nothing of a machine


@pytest.mark.parametrize(
    ("condition", "value", "wanted"),
    [
        ("set", "", True), ("set", None, False), ("unset", None, True), ("unset", "", False),
        ("> 0.85", "0.9", True), ("> 0.85", "0.85", False), (">= 32768", "32768", True), ("> 1", "auto", False),
        ("< 100", None, False), ("*Fp8*", "FP8_e4m3", True), ("fp8", "fp8_e4m3", False),
        ("unset or > 1", None, True), ("unset or > 1", "2", True), ("unset or > 1", "1", False),
    ],
)  # fmt: skip
def test_conditions(condition: str, value: str | None, wanted: bool) -> None:
    assert fits(condition, value) is wanted


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('vllm: ">=0.24"', "vllm: old", "vllm"),
        ("{--load-format: fastsafetensors}", "{load-format: fastsafetensors}", "when"),
        ('date: "2026-06-21"', 'date: "last June"', "date"),
        ("severity: note", "severity: bad", "severity"),
    ],
)
def test_what_is_no_entry_is_refused(project: Path, old: str, new: str, key: str) -> None:
    file = project / "pins/known_issues.yaml"
    file.write_text(file.read_text().replace(old, new, 1))
    with pytest.raises(ManifestError) as caught:
        manifests.load_known_issues(project)
    assert key in caught.value.key
