from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import vllm
from sparkpin_modkit import (
    BadSwitch,
    SignatureChanged,
    UnsupportedVLLM,
    check_signature,
    check_vllm,
    enabled,
    require_vllm,
    switch_name,
)
from sparkpin_modkit.checks import check_call


class Replaced:
    def method(self, layer, *args, prefix="", **kwargs):
        pass

    @classmethod
    def chosen(cls, backend, num_heads=None):
        pass


def test_switch_name() -> None:
    assert switch_name("int8-lm-head") == "SPARKPIN_MOD_INT8_LM_HEAD"


@pytest.mark.parametrize(("value", "wanted"), [("0", False), ("1", True)])
def test_switch_follows_the_variable(monkeypatch: pytest.MonkeyPatch, value: str, wanted: bool) -> None:
    monkeypatch.setenv("SPARKPIN_MOD_INT8_LM_HEAD", value)
    assert enabled("int8-lm-head", default=not wanted) is wanted


@pytest.mark.parametrize("default", [True, False])
def test_switch_unset_is_the_default(monkeypatch: pytest.MonkeyPatch, default: bool) -> None:
    monkeypatch.delenv("SPARKPIN_MOD_INT8_LM_HEAD", raising=False)
    assert enabled("int8-lm-head", default=default) is default


@pytest.mark.parametrize("value", ["", "true", "01", " 1"])
def test_other_values_raise(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SPARKPIN_MOD_INT8_LM_HEAD", value)
    with pytest.raises(BadSwitch, match=r"SPARKPIN_MOD_INT8_LM_HEAD=.*expected 0 or 1"):
        enabled("int8-lm-head")


def test_signature_accepts_names_in_order() -> None:
    check_signature(Replaced.method, "self, layer, *args, prefix, **kwargs")
    check_signature(Replaced.method, ["self", "layer", "*args", "prefix", "**kwargs"])
    check_signature(Replaced.chosen, "backend, num_heads")


@pytest.mark.parametrize(
    "expected", ["self, layer", "layer, self, *args, prefix, **kwargs", "self, layer, args, prefix, **kwargs", ""]
)
def test_signature_mismatch_names_function_seen_and_wanted(expected: str) -> None:
    with pytest.raises(SignatureChanged) as caught:
        check_signature(Replaced.method, expected)
    message = str(caught.value)
    assert f"{__name__}.Replaced.method" in message
    assert "(self, layer, *args, prefix, **kwargs)" in message
    assert f"expected ({expected})" in message


def test_signature_of_a_wrapped_function_is_the_wrapped_one() -> None:
    @functools.wraps(Replaced.method)
    def wrapper(*args, **kwargs):
        pass

    check_signature(wrapper, "self, layer, *args, prefix, **kwargs")


def test_signature_that_cannot_be_read() -> None:
    with pytest.raises(SignatureChanged, match="cannot be read"):
        check_signature(max, "a, b")


def test_require_vllm_ignores_the_local_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.32.0+cpu")
    assert require_vllm(["0.31.0", "0.32.0"]) == "0.32.0"


@pytest.mark.parametrize("seen", ["0.33.0", "0.32.1", "0.32.0.dev1", "dev"])
def test_require_vllm_names_seen_and_wanted(monkeypatch: pytest.MonkeyPatch, seen: str) -> None:
    monkeypatch.setattr(vllm, "__version__", seen)
    with pytest.raises(UnsupportedVLLM, match=f"vLLM {seen} is installed, expected one of: 0.32.0"):
        require_vllm(["0.32.0"])


def test_import_loads_neither_torch_nor_vllm() -> None:
    code = "import sys, sparkpin_modkit; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def installed(monkeypatch: pytest.MonkeyPatch, **touches: str | None) -> dict[str, dict[str, str | None]]:
    monkeypatch.setattr(vllm, "__version__", "0.32.0+cpu")
    return {"0.32.0": {f"{__name__}:{name.replace('__of__', '.')}": wanted for name, wanted in touches.items()}}


class Fields:
    annotated: int


class Heir(Fields):
    pass


def test_check_vllm_returns_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    touches = installed(monkeypatch, Replaced__of__chosen="backend, num_heads", Replaced=None, Heir__of__annotated=None)
    assert check_vllm(touches) == "0.32.0"


@pytest.mark.parametrize(
    ("name", "wanted", "message"),
    [
        ("Replaced__of__chosen", "backend", r"Replaced.chosen takes \(backend, num_heads\), expected \(backend\)"),
        ("Replaced__of__gone", None, r"has no Replaced.gone"),
        ("Gone", "x", r"has no Gone"),
    ],
)
def test_check_vllm_names_what_differs(monkeypatch: pytest.MonkeyPatch, name: str, wanted: str, message: str) -> None:
    with pytest.raises(SignatureChanged, match=message):
        check_vllm(installed(monkeypatch, **{name: wanted}))


def test_check_vllm_names_a_missing_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.32.0")
    with pytest.raises(SignatureChanged, match=r"vLLM has no vllm.gone, expected vllm.gone:A"):
        check_vllm({"0.32.0": {"vllm.gone:A": None}})


def called(config, spec, layers=(), *, device="cpu", **more):
    pass


@pytest.mark.parametrize(
    "call", ["(config, spec)", "(config, spec, layers)", "(config, spec, *, device)", "(config, *, spec, anything)"]
)
def test_a_function_that_is_only_called_may_take_more(call: str) -> None:
    check_call(called, call)


@pytest.mark.parametrize(
    ("fn", "call"),
    [
        (called, "(config)"),  # one that it needs is not given
        (called, "(spec, config)"),  # the same number, in another order
        (called, "(config, spec, layers, device)"),
        (lambda config, *, spec: None, "(config, spec)"),
        (lambda config, *rest: None, "(config, spec)"),
        (lambda config, spec, needed: None, "(config, spec)"),
        (lambda config, spec: None, "(config, *, spec, device)"),
        (max, "(a, b)"),
    ],
)
def test_a_call_that_is_not_taken_or_means_something_else(fn, call: str) -> None:
    with pytest.raises(SignatureChanged, match=r"call|by place"):
        check_call(fn, call)


RELEASE = vllm.__version__.partition("+")[0]
INC = "vllm.model_executor.layers.quantization.inc"
REAL = {
    f"{INC}:INCConfig.get_quant_method": "self, layer, prefix",
    f"{INC}.inc_linear:INCLinearMethod": "(scheme)",
    "vllm.logger:init_logger": "(name)",
    "vllm:__version__": None,
}


@pytest.fixture
def patch_release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The installed vLLM as if it were a patch of its release; what it holds of inc is a copy, to be doctored."""
    before, inc = Path(vllm.__file__).parent, "/".join(INC.split(".")[1:])
    shutil.copytree(before / inc, tmp_path / "vllm" / inc)
    monkeypatch.setattr(vllm, "__version__", f"{RELEASE.rpartition('.')[0]}.7+cpu")
    monkeypatch.setattr(vllm, "__file__", str(tmp_path / "vllm/__init__.py"))
    return tmp_path / "vllm" / inc


def doctor(folder: Path, before: str, after: str) -> None:
    hits = [path for path in folder.rglob("*.py") if before in path.read_text()]
    assert hits
    for path in hits:
        path.write_text(path.read_text().replace(before, after))


def test_a_patch_release_that_left_it_alone_is_taken_for_its_release(patch_release: Path) -> None:
    assert check_vllm({RELEASE: REAL}) == RELEASE


def test_what_is_only_called_may_be_other_code_in_a_patch_release(patch_release: Path) -> None:
    doctor(patch_release, "self.scheme = scheme", "self.scheme = (scheme)")
    assert check_vllm({RELEASE: REAL}) == RELEASE


@pytest.mark.parametrize("after", ["def get_quant_method(  ", "def gone("])
def test_a_patch_release_that_changed_what_is_replaced_is_named(patch_release: Path, after: str) -> None:
    doctor(patch_release, "def get_quant_method(", after)
    with pytest.raises(SignatureChanged, match=r"\.7 is installed, whose code .*:INCConfig.get_quant_method; expected"):
        check_vllm({RELEASE: REAL})


@pytest.mark.parametrize("seen", ["0.31.0", "7.7.7", "dev", f"{RELEASE}rc1", f"{RELEASE.rpartition('.')[0]}.7.dev1"])
def test_other_releases_are_refused_as_before(monkeypatch: pytest.MonkeyPatch, seen: str) -> None:
    monkeypatch.setattr(vllm, "__version__", seen)
    with pytest.raises(UnsupportedVLLM):
        check_vllm({RELEASE: REAL})
