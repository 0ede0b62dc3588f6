"""What a vLLM takes on its command line, exported from its own parser, as data for `recipe check`.

    python benchmarks/vllm_parser.py IMAGE WHEEL [--mount]

runs this file in IMAGE, which has the vLLM of a stack (or, with --mount, its libraries; then the Python files of WHEEL
stand in for the vLLM of the image, which is how the data of a vLLM for another processor is made), and writes
`src/sparkpin/recipes/vllm/VERSION.json`. WHEEL is the file that the stack's lock names. Nothing uses the network.

A flag: `also` (other names), `nargs`, `type` (a name of `TYPES` in sparkpin.recipes.vllm_parser), `none` (an empty
value and "None" mean none), `choices` (the parser refuses others), `known` (what vLLM takes later; `open`: or a path of
a class, or what a plugin brings), `same` (of these the names of one class, each with the first of them), `bounds`,
`default`, `config` (a class of `configs`). A configuration's fields have a
form each: a name of a type, or `{"literal": [...]}`, `{"list": form}`, `{"dict": form}`, `{"config": name}`; a list is
a union. `architectures`: names of config.json that vLLM's registry has, those of models that write `text` and `other`
ones (vectors, scores, drafts).
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import types
import typing
import zipfile
from pathlib import Path
from typing import Any

PLAIN = {str: "str", int: "int", float: "float", bool: "bool", type(None): "none", Path: "str", dict: {"dict": "any"}}
BOUNDS = ("gt", "ge", "lt", "le")
TYPES = {
    "human_readable_int": "human",
    "human_readable_int_or_auto": "human_or_auto",
    "union_dict_and_str": "json_or_text",
    "loads": "json",
    "int": "int",
    "float": "float",
}
MARKER = "PARSER "
BY_VLLM = ("ModelConfig", "ParallelConfig")  # of a draft: vLLM itself hands these over


class Exporter:
    """In the image: the classes that flags are made of, each exported once."""

    def __init__(self) -> None:
        self.configs: dict[str, Any] = {}

    def form(self, hint: Any) -> Any:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin is typing.Annotated:
            return self.form(arguments[0])
        if origin in (typing.Union, types.UnionType):
            forms = [self.form(one) for one in arguments]
            return "any" if "any" in forms else forms
        if origin is typing.Literal:
            return {"literal": list(arguments)}
        if origin in (list, set, tuple, frozenset):
            return {"list": self.form(arguments[0]) if arguments else "any"}
        if origin is dict:
            return {"dict": self.form(arguments[1])}
        if isinstance(hint, type) and dataclasses.is_dataclass(hint) and hint.__name__ not in BY_VLLM:
            return {"config": self.config(hint)}
        return PLAIN.get(hint, "any")

    def config(self, kind: type) -> str:
        """The name of a class whose fields are in `configs`."""
        if kind.__name__ in self.configs:
            return kind.__name__
        fields: dict[str, Any] = {}
        self.configs[kind.__name__] = fields
        hints = typing.get_type_hints(kind, include_extras=True)
        loose, wrapped = validated(kind, "before", "plain"), validated(kind, "wrap")  # which let none pass
        for field in dataclasses.fields(kind):
            if not field.init:
                continue
            hint = hints[field.name]
            is_loose = field.name in loose and not dataclasses.is_dataclass(hint)
            form = probed(kind, field.name, hint) if is_loose else self.form(hint)
            if field.name in wrapped and form != "any":
                form = [*(form if isinstance(form, list) else [form]), "none"]
            found = bounds(field, hint)
            fields[field.name] = {"of": form, **found} if found and form != "any" else form
        if getattr(kind, "__pydantic_config__", {}).get("extra") != "forbid":
            fields["*"] = "any"
        return kind.__name__


def validated(kind: type, *modes: str) -> set[str]:
    """Fields whose values a validator of these modes sees before their type is looked at."""
    found = getattr(kind, "__pydantic_decorators__", None)
    every = found.field_validators.values() if found else ()
    return {name for one in every if one.info.mode in modes for name in one.info.fields}


def probed(kind: type, name: str, hint: Any) -> Any:
    """Of a field with an enumeration: what of its names and values it takes; else anything."""
    from pydantic import TypeAdapter, ValidationError

    members: list[Any] = []
    for part in (hint, *typing.get_args(hint)):
        members += list(part) if isinstance(part, enum.EnumMeta) else []
        members += typing.get_args(part) if typing.get_origin(part) is typing.Literal else []
    pairs = [(one.name.lower(), one.value) if isinstance(one, enum.Enum) else (one,) for one in members]
    names = [word for pair in pairs for word in pair]
    words = {"auto", *names}
    taken = []
    for word in sorted((one for one in words if isinstance(one, str | int)), key=str):
        try:
            TypeAdapter(kind).validate_python({name: word})
        except ValidationError as error:
            if any(name in one["loc"] for one in error.errors()):
                continue
        except Exception:
            continue
        taken.append(word)
    none = ["none"] if type(None) in typing.get_args(hint) else []
    return [{"literal": taken, "any_case": True}, *none] if members and taken else "any"


def bounds(field: Any, hint: Any = None) -> dict[str, Any]:
    metadata = [*getattr(field.default, "metadata", ()), *getattr(hint, "__metadata__", ())]
    nested = [part for one in metadata for part in getattr(one, "metadata", ())]
    return {name: getattr(one, name) for one in (*metadata, *nested) for name in BOUNDS if hasattr(one, name)}


def type_of(function: Any, exporter: Exporter) -> dict[str, Any]:
    """The callable that a parser's action converts with, by name."""
    name = getattr(function, "__qualname__", "str")
    if name.startswith("optional_type."):
        return {**type_of(function.__closure__[0].cell_contents, exporter), "none": True}
    if name.startswith("parse_type."):
        return type_of(function.__closure__[0].cell_contents, exporter)
    if "parse_dataclass" in name:
        return {"type": "config", "config": exporter.config(function.__defaults__[0])}
    if name.endswith("<lambda>"):
        return {"type": "lower" if "lower" in inspect.getsource(function) else "str"}
    return {"type": TYPES.get(name, "str")}


def flags_of(exporter: Exporter) -> dict[str, Any]:
    import argparse

    import vllm.config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import FrontendArgs, make_arg_parser
    except ImportError:
        from vllm.entrypoints.common.cli_args import FrontendArgs, make_arg_parser

    classes = [one for one in vars(vllm.config).values() if isinstance(one, type) and dataclasses.is_dataclass(one)]
    limits = {field.name: found for one in classes for field in dataclasses.fields(one) if (found := bounds(field))}
    hints: dict[str, Any] = {}
    for one in (EngineArgs, FrontendArgs):
        hints |= {field.name: field.type for field in dataclasses.fields(one)}
    later = values_after_the_parser(exporter)
    flags: dict[str, Any] = {}
    for action in make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))._actions:
        longs = [name for name in action.option_strings if name.startswith("--") and not name.startswith("--no-")]
        if not longs or longs[0] == "--help":
            continue
        entry: dict[str, Any] = {}
        if also := [name for name in action.option_strings if name != longs[0] and not name.startswith("--no-")]:
            entry["also"] = also
        if isinstance(action, argparse.BooleanOptionalAction):
            entry["nargs"] = "switch"
        elif action.nargs is not None:
            entry["nargs"] = action.nargs
        if action.nargs != 0:
            entry |= type_of(action.type, exporter)
            if entry["type"] in ("json", "json_or_text") and action.dest in hints:
                entry["form"] = exporter.form(hints[action.dest])
            if action.choices:
                entry["choices"] = [one for one in action.choices if one is not None]
            elif isinstance(action.metavar, list | tuple):
                entry |= {"known": [one for one in action.metavar if one is not None], "open": True}
            if action.dest in limits and entry["type"] in ("int", "float", "human", "human_or_auto"):
                entry["bounds"] = limits[action.dest]
        entry |= later.get(longs[0], {})
        if isinstance(action.default, str | int | float) and action.default != "==SUPPRESS==":
            entry["default"] = action.default
        flags[longs[0]] = entry
    return dict(sorted(flags.items()))


def values_after_the_parser(exporter: Exporter) -> dict[str, dict[str, Any]]:
    """What vLLM compares a text with once its parser has taken it."""
    from vllm.config import AttentionConfig, SpeculativeConfig
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
    from vllm.reasoning import _REASONING_PARSERS_TO_REGISTER
    from vllm.tokenizers.registry import _VLLM_TOKENIZERS
    from vllm.tool_parsers import _TOOL_PARSERS_TO_REGISTER

    exporter.config(AttentionConfig)
    backends = exporter.configs["AttentionConfig"]["backend"][0]["literal"]
    return {
        "--attention-backend": {"known": sorted({str(one).lower() for one in backends})},
        "--quantization": {"known": sorted(QUANTIZATION_METHODS)},
        "--load-format": {"known": sorted(_LOAD_FORMAT_TO_MODEL_LOADER)},
        "--tool-call-parser": registered(_TOOL_PARSERS_TO_REGISTER),
        "--reasoning-parser": registered(_REASONING_PARSERS_TO_REGISTER),
        "--tokenizer-mode": {"known": sorted({"auto", *_VLLM_TOKENIZERS})},
        "--speculative-config": {"config": exporter.config(SpeculativeConfig), "form": None},
    }


def registered(parsers: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """Of a registry with the module and the class of each name."""
    first = {where: name for name, where in sorted(parsers.items(), reverse=True)}
    same = {name: first[where] for name, where in sorted(parsers.items()) if first[where] != name}
    return {"known": sorted(parsers), "same": same}


def architectures() -> dict[str, list[str]]:
    """Not those of Transformers' own classes, whose name says nothing of the model."""
    from vllm.model_executor.models import registry

    names = ("TEXT_GENERATION", "MULTIMODAL", "TRANSFORMERS_SUPPORTED")
    text = {one for name in names for one in getattr(registry, f"_{name}_MODELS")}
    return {
        "text": sorted(text),
        "other": sorted({*registry._VLLM_MODELS} - text - {*registry._TRANSFORMERS_BACKEND_MODELS}),
    }


def export() -> None:
    """In the image."""
    sys.modules["torchvision"] = None  # type: ignore[assignment]  # its kernels may be for another torch; no flag needs it
    import vllm
    import vllm.envs

    exporter = Exporter()
    flags = flags_of(exporter)
    found = {
        "version": vllm.__version__.partition("+")[0],
        "flags": flags,
        "configs": dict(sorted(exporter.configs.items())),
        "environment": sorted(vllm.envs.environment_variables),
        "architectures": architectures(),
    }
    print(MARKER + json.dumps(found, default=str))


def exported(image: str, wheel: Path, *, mount: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        more = []
        if mount:
            with zipfile.ZipFile(wheel) as packed:
                for name in packed.namelist():
                    if name.endswith(".py") or ".dist-info/" in name:
                        packed.extract(name, folder)
            os.chmod(folder, 0o755)
            more = ["-v", f"{folder}:/other:ro", "-e", "PYTHONPATH=/other", "-e", "VLLM_TARGET_DEVICE=cpu"]
        own = f"{Path(__file__).resolve()}:/export.py:ro"
        command = ["docker", "run", "--rm", "--network", "none", "-e", "HF_HUB_OFFLINE=1", "-v", own, *more, image]
        command += ["python3", "/export.py", "--inside"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith(MARKER))
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    source = {"wheel": wheel.name, "size": wheel.stat().st_size, "sha256": digest}
    value = json.loads(line.removeprefix(MARKER))
    return {"version": value.pop("version"), "source": source, **value}


def text_of(value: dict[str, Any]) -> str:
    """JSON with one flag, class or list a line, so that a new release's changes can be read."""
    parts = []
    for key, part in value.items():
        if key in ("flags", "configs", "architectures"):
            rows = [f"{json.dumps(name)}: {json.dumps(one, separators=(',', ':'))}" for name, one in part.items()]
            parts.append(f'"{key}": {{\n' + ",\n".join(rows) + "\n}")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(part)}")
    return "{" + ",\n".join(parts) + "}\n"


def main(image: str, wheel: str, *options: str) -> None:
    from sparkpin.core import files
    from sparkpin.recipes.vllm_parser import DATA

    value = exported(image, Path(wheel), mount="--mount" in options)
    path = DATA / f"{value['version']}.json"
    with files.atomic_file(path) as file:
        file.write(text_of(value).encode())
    print(f"{path}: {len(value['flags'])} flags, {len(value['configs'])} configurations")


if __name__ == "__main__":
    if sys.argv[1:] == ["--inside"]:
        export()
    else:
        main(*sys.argv[1:])
