"""Two-shard checkpoints of a few bytes, with the names of the real INT4 and FP8 pair, for the checkpoint tests."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkpin.checkpoint.content import Hashes
from sparkpin.checkpoint.plan import CheckpointPlan, donor_tensors, final_tensors, make_plan
from sparkpin.checkpoint.repository import (
    CONFIG,
    INDEX,
    FileBytes,
    Listing,
    Places,
    TensorPlace,
    is_shard,
    read_repository,
)
from sparkpin.checkpoint.safetensors import (
    Header,
    TensorSource,
    parse_header,
    read_header_bytes,
    tensor_nbytes,
    write_file,
)
from sparkpin.checkpoint.steps import locked_steps
from sparkpin.checkpoint.write import write_checkpoint
from sparkpin.core.paths import Paths
from sparkpin.fetch.store import Store
from sparkpin.pins.manifests import model_inputs
from sparkpin.pins.schema import LockedFile, ModelLock, ModelPin, RepositoryLock

Spec = tuple[str, tuple[int, ...]]
Shards = dict[str, dict[str, Spec]]

BODY = "model.language_model.layers."
REVISIONS = {"int4": "a" * 40, "fp8": "b" * 40}
MODULES = [f"{BODY}{layer}.mlp.shared_expert.{part}_proj" for layer in (0, 1) for part in ("down", "gate", "up")]
TEXTS = ("model.safetensors.index.json", "config.json")
EXTRA = "model_extra_tensors.safetensors"
ENTRY = {"bits": 8, "group_size": [4, 4], "sym": True, "data_type": "fp"}
MTP_MODULES = ["self_attn.q_proj", "mlp.gate", *(f"mlp.shared_expert.{part}_proj" for part in ("down", "gate", "up"))]
MTP = [f"mtp.{name}.weight" for name in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")] + [
    f"mtp.layers.0.{module}.weight" for module in MTP_MODULES
]

RULE = {"modules": ["model.*.mlp.shared_expert.*_proj"], "format": "fp8", "source": "fp8", "block": [4, 4]}
PIN = ModelPin.model_validate(
    {
        "name": "sample",
        "description": "two shards",
        "base": "int4",
        "repositories": {
            "int4": {"repo": "acme/sample-int4", "revision": REVISIONS["int4"]},
            "fp8": {"repo": "acme/sample-fp8", "revision": REVISIONS["fp8"]},
        },
        "hybrid": {"rules": [RULE]},
        "mtp": {"file": EXTRA, "tensors": ["mtp.*"]},
    }
)
HYBRID = ("copy", "hybrid")
ALL = ("copy", "hybrid", "mtp")


def read_header(path: Path) -> Header:
    return parse_header(read_header_bytes(path), file_size=path.stat().st_size, origin=str(path))


def base_shards() -> Shards:
    """Shared experts of [6, 5] in BF16, which blocks of 4 x 4 do not divide; one INT4 attention matrix a layer."""
    shards: Shards = {}
    for layer in (0, 1):
        prefix = f"{BODY}{layer}."
        shards[f"model-{layer + 1:05}-of-00002.safetensors"] = {
            f"{prefix}self_attn.q_proj.qweight": ("I32", (1, 8)),
            f"{prefix}self_attn.q_proj.scales": ("F16", (1, 8)),
            f"{prefix}mlp.gate.weight": ("BF16", (3, 5)),
            **{f"{module}.weight": ("BF16", (6, 5)) for module in MODULES if module.startswith(prefix)},
        }
    shards[EXTRA] = dict.fromkeys(MTP, ("BF16", (2, 3)))
    return shards


def fp8_shards() -> Shards:
    """The same linear layers, and attention that no step takes. Cut into shards at other places than the base."""
    first = {f"{module}.weight": ("F8_E4M3", (6, 5)) for module in MODULES}
    second: dict[str, Spec] = {f"{module}.weight_scale_inv": ("BF16", (2, 2)) for module in MODULES}
    for layer in (0, 1):
        second[f"{BODY}{layer}.self_attn.q_proj.weight"] = ("F8_E4M3", (8, 8))
    return {"model-00001-of-00002.safetensors": dict(first), "model-00002-of-00002.safetensors": second}


def base_config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "text_config": {"mtp_num_hidden_layers": 1},
        "quantization_config": {
            "quant_method": "auto-round",
            "bits": 4,
            "extra_config": {f"{BODY}0.mlp.gate": {"bits": 16}, MODULES[0]: {"bits": 16, "data_type": "float"}},
        },
    }


def fp8_config() -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}


def data_of(repository: str, name: str, spec: Spec) -> bytes:
    """Bytes that are different for every repository and tensor."""
    return hashlib.shake_256(f"{repository} {name}".encode()).digest(tensor_nbytes(*spec))


def write_repository(
    folder: Path,
    shards: Shards,
    config: Mapping[str, Any] | None,
    *,
    repository: str,
    unlisted: tuple[str, ...] = (EXTRA,),
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file, tensors in shards.items():
        sources = [TensorSource(name, *spec, (data_of(repository, name, spec),)) for name, spec in tensors.items()]
        write_file(folder / file, sources, {"format": "pt"})
    weight_map = {name: file for file, tensors in shards.items() if file not in unlisted for name in tensors}
    total = sum(tensor_nbytes(*spec) for file in shards if file not in unlisted for spec in shards[file].values())
    value = {"metadata": {"total_size": total, "made_by": "acme"}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(value))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    (folder / "README.md").write_text(f"# {repository}\n")
    return folder


class Sample:
    """Repositories to spoil before they are written and planned. pin_changes: keys of the pin."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base, self.fp8 = base_shards(), fp8_shards()
        self.shards = {"int4": self.base, "fp8": self.fp8}
        self.configs: dict[str, Any] = {"int4": base_config(), "fp8": fp8_config()}
        self.unlisted: tuple[str, ...] = (EXTRA,)
        self.pin_changes: dict[str, Any] = {}

    @property
    def pin(self) -> ModelPin:
        value = PIN.model_dump() | self.pin_changes
        for name in self.shards.keys() - value["repositories"].keys():
            value["repositories"][name] = {"repo": "acme/sample", "revision": "c" * 40}
        return ModelPin.model_validate(value)

    def folders(self) -> dict[str, Path]:
        return {
            name: write_repository(
                self.root / name, shards, self.configs[name], repository=name, unlisted=self.unlisted
            )
            for name, shards in self.shards.items()
        }

    def plan(self, steps: tuple[str, ...]) -> CheckpointPlan:
        return make_plan(listings_of(self.folders()), self.pin, steps)

    def build(self, steps: tuple[str, ...], name: str = "made") -> Path:
        """Built, and compared with its sources."""
        pin, folders = self.pin, self.folders()
        plan, lock, places = make_plan(listings_of(folders), pin, steps), lock_of(folders, pin), places_of(folders)
        made = self.root / name
        write_checkpoint(made, pin, lock, plan, places, Hashes(self.root / "hashed.json"))
        planned = {place.info.name: place for place in final_tensors(plan, listings_of(folders))}
        got = {name: tensor[3] for name, tensor in read_tensors(made).items()}
        assert got == {name: bytes_of(places, place) for name, place in planned.items()}
        for link in plan.links:
            assert (made / link.path).samefile(places.linked(link.path, link.of or plan.base))
        check_fits_itself(made, plan)
        return made


def bytes_of(places: Places, place: TensorPlace) -> bytes:
    return b"".join(map(bytes, places.of(place, place.info.nbytes).chunks()))


def check_fits_itself(folder: Path, plan: CheckpointPlan) -> None:
    """As a loader reads it: the index is of these tensors, and an FP8 weight has a scale and an entry in the config."""
    read, tensors = read_repository(listing_of("made", folder)), read_tensors(folder)
    assert read.unlisted.keys() == plan.unlisted
    total = sum(len(tensors[name][3]) for name in read.listed)
    assert read.index and read.index["metadata"]["total_size"] == total == read.listed_bytes
    if "hybrid" in plan.steps:
        extra = read.config["quantization_config"].get("extra_config", {})
        fp8 = {name.removesuffix(".weight") for name, tensor in tensors.items() if tensor[1] == "F8_E4M3"}
        scales = {name.removesuffix(".weight_scale_inv") for name in tensors if name.endswith(".weight_scale_inv")}
        assert fp8 == scales == {name for name, entry in extra.items() if entry.get("data_type") == "fp"}


def sample_paths(root: Path) -> Paths:
    return Paths(root / "project", root / "cache", root / "home")


def sample_folders(paths: Paths) -> dict[str, Path]:
    """Whole repositories: the base where `fetch` leaves it, the donor where only the tests look."""
    base = PIN.repositories["int4"]
    return {"int4": paths.models / base.repo / base.revision, "fp8": paths.cache.parent / "published-fp8"}


def write_sample(paths: Paths, *, scale: int = 1) -> dict[str, Path]:
    """Both repositories, and of the donor what `fetch` would leave. `scale` makes every gate that many times longer."""
    folders = sample_folders(paths)
    base, fp8 = base_shards(), fp8_shards()
    if scale > 1:
        for tensors in base.values():
            for name, (dtype, shape) in tensors.items():
                if name.endswith(".mlp.gate.weight"):
                    tensors[name] = (dtype, (shape[0] * scale, *shape[1:]))
    write_repository(folders["int4"], base, base_config(), repository="int4")
    write_repository(folders["fp8"], fp8, fp8_config(), repository="fp8")
    bring_donor(paths, folders["fp8"])
    return folders


def bring_donor(paths: Paths, folder: Path) -> None:
    """Headers and tensors to the store, index and config to the cache, as `fetch` leaves them."""
    repository = PIN.repositories["fp8"]
    whole = paths.models / repository.repo / repository.revision
    whole.mkdir(parents=True, exist_ok=True)
    for file in TEXTS:
        shutil.copyfile(folder / file, whole / file)
    blobs = [read_header_bytes(path) for path in folder.glob("*.safetensors")]
    for data in [*blobs, *(tensor[3] for tensor in read_tensors(folder).values())]:
        sha256 = hashlib.sha256(data).hexdigest()
        blob = Store(paths.store).path(sha256)
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)


def listing_of(name: str, folder: Path) -> Listing:
    """A repository whose files are all here."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    headers = FileBytes({file: path for file, path in files.items() if is_shard(file)}, read_header_bytes)
    texts = FileBytes({file: files[file] for file in (INDEX, CONFIG) if file in files})
    return Listing(name, str(folder), {file: path.stat().st_size for file, path in files.items()}, headers, texts)


def listings_of(folders: Mapping[str, Path]) -> dict[str, Listing]:
    return {name: listing_of(name, folder) for name, folder in folders.items()}


def places_of(folders: Mapping[str, Path]) -> Places:
    """Every repository whole."""
    return Places(folders, {})


def row(name: str, file: str, data: bytes) -> LockedFile:
    return LockedFile(name=name, file=file, size=len(data), sha256=hashlib.sha256(data).hexdigest())


def lock_of(folders: Mapping[str, Path], pin: ModelPin = PIN) -> ModelLock:
    """The lock that `lock --model` would write."""
    plan = make_plan(listings_of(folders), pin, locked_steps(pin))
    repositories = {}
    for name, folder in folders.items():
        names = [source.info.name for source in donor_tensors(plan).get(name, [])]
        files = {path.name: path for path in sorted(folder.iterdir())}
        shards = {file: read_header_bytes(path) for file, path in files.items() if file.endswith(".safetensors")}
        kept = [file for file in files if name == "int4" or file in (*TEXTS, *shards)]
        tensors = read_tensors(folder)
        repositories[name] = RepositoryLock(
            repo=pin.repositories[name].repo,
            revision=pin.repositories[name].revision,
            files=[row(file, file, files[file].read_bytes()) for file in kept],
            headers=[row(file, file, data) for file, data in shards.items()],
            tensors=[row(tensor, tensors[tensor][0], tensors[tensor][3]) for tensor in names],
        )
    return ModelLock(model=pin.name, inputs=model_inputs(pin), repositories=repositories)


def read_tensors(folder: Path) -> dict[str, tuple[str, str, tuple[int, ...], bytes]]:
    """name -> (file, dtype, shape, bytes) of every tensor of a folder."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        content = path.read_bytes()
        for info in read_header(path).tensors.values():
            found[info.name] = (path.name, info.dtype, info.shape, content[info.begin : info.end])
    return found


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
