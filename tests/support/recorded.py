"""Two releases that no engine has built: records, listings, inputs and wheels as a build would leave them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import made_releases
import tiny_images

from sparkpin.build import rootfs
from sparkpin.build.record import BuildInput, BuildRecord, LayerRecord, layer_file, write_record
from sparkpin.core.paths import Paths
from sparkpin.history.diff import Difference
from sparkpin.history.diff_text import difference_lines
from sparkpin.image.listing import Contents, PathEntry, write_contents
from sparkpin.pins import schema
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.record import Release, Releases

STACK = """\
description: made up
platform: linux/amd64
default_recipe: made
debian: {suite: bookworm, packages: [dash]}
python:
  version: "3.11"
  requirements: [alpha==1.0]
  layers:
    - {name: first, packages: [alpha]}
    - {name: rest, packages: ["*"]}
mods: []
"""
SITE = "opt/vllm/lib/python3.11/site-packages"
HELLO = b'"""Made up."""\nVALUE = 1\n'


def sha(data: bytes | str) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def file(path: str, text: str | bytes, owner: str = "", mode: int = 0o644) -> PathEntry:
    return PathEntry(path, "file", mode, 0, 0, len(text), sha256=sha(text), owner=owner)


def folder(path: str, mode: int = 0o755) -> PathEntry:
    return PathEntry(path, "dir", mode, 0, 0, 0)


def link(path: str, target: str, owner: str = "") -> PathEntry:
    return PathEntry(path, "symlink", 0o777, 0, 0, 0, link=target, owner=owner)


def deb(name: str, version: str) -> schema.LockedDeb:
    return schema.LockedDeb(
        name=name, version=version, file=f"{name}_{version}_amd64.deb", size=10_000, sha256=sha(f"{name} {version}")
    )


ROOT: Contents = (
    link("bin", "usr/bin", "deb:util-linux"),
    folder("etc"),
    file("etc/gone", "bye\n", "deb:dash"),
    file("etc/passwd", "root\n"),
    folder("usr"),
    folder("usr/bin"),
    link("usr/bin/awk", "/etc/alternatives/awk"),
    file("usr/bin/dash", "shell", "deb:dash", 0o755),
    link("usr/bin/sh", "dash", "deb:dash"),
)
VENV: Contents = (folder("opt"), folder("opt/vllm"), file("opt/vllm/pyvenv.cfg", "home = /usr/bin\n"))


def wheel_layer(name: str, text: str, version: str = "1.0") -> Contents:
    owner, info = f"wheel:{name}", f"{SITE}/{name}-{version}.dist-info"
    return (
        folder("opt"),
        folder(f"{SITE}/{name}"),
        file(f"{SITE}/{name}/__init__.py", text, owner),
        file(f"{info}/RECORD", f"record of {text}", owner),
    )


@dataclass(frozen=True)
class Site:
    """A project with the stages base and one (mod hello) of the stack `made`, and its state folders."""

    paths: Paths

    @classmethod
    def make(cls, where: Path) -> Site:
        project = tiny_images.make_project(where / "project", "made")
        tiny_images.write(project / "pins/stacks/made.yaml", STACK)
        return cls(Paths(project, where / "cache", where / "home"))

    def record(
        self,
        stage: str,
        parent: BuildRecord | None,
        layers: Sequence[tuple[str, Contents]],
        context: Sequence[BuildInput],
        spec: rootfs.RootfsSpec | None = None,
    ) -> BuildRecord:
        """layers: (name, contents), of the first stage with the root file system's at the beginning."""
        ids = [self.listed(contents) for _, contents in layers]
        key = sha(json.dumps([stage, parent.key if parent else "", ids, [row.sha256 for row in context]]))
        all_ids = [*(parent.diff_ids if parent else ()), *ids]
        config = {
            "os": "linux",
            "config": {"Env": ["PATH=/usr/bin"], "Labels": {"sparkpin.key": key, "sparkpin.stage": stage}},
            "rootfs": {"diff_ids": all_ids},
        }
        made = BuildRecord(
            stack="made",
            stage=stage,
            key=key,
            parent_key=parent.key if parent else None,
            ref=f"sparkpin/stack-made:{stage}-{key[:12]}",
            parent_ref=parent.ref if parent else "sparkpin/rootfs:bookworm-0123456789ab",
            platform="linux/amd64",
            rootfs=spec,
            dockerfile=f"FROM {parent.ref if parent else 'sparkpin/rootfs:bookworm-0123456789ab'}\n# {key}\n",
            context=list(context),
            layers=[
                LayerRecord(name=name, key=sha(name), diff_id=diff_id)
                for (name, _), diff_id in zip(layers, ids, strict=True)
                if name
            ],
            config=json.dumps(config),
            config_digest=f"sha256:{sha(json.dumps(config))}",
            diff_ids=all_ids,
            size=1000,
            seconds=1.0,
        )
        write_record(self.paths, made)
        return made

    def listed(self, contents: Contents) -> str:
        """The diff ID of a layer that has this listing."""
        diff_id = f"sha256:{sha(repr(contents))}"
        write_contents(layer_file(self.paths, diff_id), contents)
        return diff_id

    def spec(self, *debs: schema.LockedDeb) -> rootfs.RootfsSpec:
        return rootfs.RootfsSpec(
            suite="bookworm",
            platform="linux/amd64",
            debs=list(debs),
            merged=["bin"],
            script="echo sparkpin >>/etc/passwd\n",
            epoch=1767225600,
        )

    def wheel(self, layer: str, key: str) -> BuildInput:
        file = f"{key.replace(' ', '-')}-py3-none-any.whl"
        return BuildInput(path=f"wheels/{layer}/{file}", sha256=sha(key), size=900, what=f"wheel {key}")

    def mod(self, text: str) -> BuildInput:
        path = "wheels/hello/sparkpin_hello-0.1.0-py3-none-any.whl"
        return BuildInput(path=path, sha256=sha(f"wheel of {text}"), size=900, what="mod hello 0.1.0")

    def inputs(self) -> dict[str, str]:
        """Every file of the project that a release names, kept."""
        names = ["pins/stacks/made.yaml", "stages/base.yaml", "stages/one.yaml", "dockerfiles/base.j2"]
        names += ["dockerfiles/child.j2", "mods/hello/pyproject.toml", "mods/hello/sparkpin_hello/__init__.py"]
        found = {name: sha((self.paths.project / name).read_bytes()) for name in names}
        KeptInputs.of(self.paths).keep_project(self.paths.project, found)
        return found

    def release(self, last: BuildRecord, argv: Sequence[str] = (), checkpoint: str = "c") -> Release:
        made = made_releases.release(
            1,
            recipe="made",
            stage=last.stage,
            stack="made",
            model="made",
            build_key=last.key,
            image=last.config_digest,
            diff_ids=tuple(last.diff_ids),
            size=last.size,
            checkpoint_key=checkpoint * 64,
            argv=("vllm", "serve", "/model", *argv),
            env={"OMP_NUM_THREADS": "1"},
            inputs=self.inputs(),
        )
        Releases(self.paths).save(made)
        return made

    def base(
        self, root: Contents, alpha: Contents, wheels: Sequence[BuildInput], *debs: schema.LockedFile
    ) -> BuildRecord:
        """debs: besides those that are the same in both."""
        layers = [("", root), ("venv", VENV), ("first", alpha), ("rest", wheel_layer("beta", "b"))]
        same = (deb("libc6", "2.36-9"), deb("python3.11-minimal", "3.11.2-6"))
        return self.record("base", None, layers, wheels, self.spec(*same, *debs))

    def first(self) -> Release:
        """alpha 1.0, beta 1.0, gamma 1.0; dash 1.0~rc1, libc6, python3; the mod hello, which replaces a file."""
        wheels = [self.wheel("first", "alpha 1.0"), self.wheel("rest", "beta 1.0"), self.wheel("rest", "gamma 1.0")]
        alpha = wheel_layer("alpha", "a = 1\n")
        base = self.base(ROOT, alpha, wheels, deb("dash", "1.0~rc1"), deb("old", "1"))
        return self.release(self.stage_one(base, HELLO.decode()), ["--port", "8000", "--quiet"])

    def second(self) -> Release:
        """alpha up, gamma out, another beta in the same version, dash up, `old` out and `new` in; the mod edited."""
        changed = {"usr/bin/dash": {"sha256": sha("new shell")}, "etc/passwd": {"mode": 0o600}}
        root = tuple(dataclasses.replace(entry, **changed.get(entry.path, {})) for entry in ROOT)
        root = (*root, file("etc/odd\udcff", "odd"))
        beta = self.wheel("rest", "beta 1.0").model_copy(update={"sha256": sha("other beta")})
        alpha = wheel_layer("alpha", "a = 2\n", "1.10")
        wheels = [self.wheel("first", "alpha 1.10"), beta]
        base = self.base(root, alpha, wheels, deb("dash", "1.0"), deb("new", "1:2-3"))
        tiny_images.write(self.paths.project / "mods/hello/sparkpin_hello/__init__.py", '"""Made up."""\nVALUE = 2\n')
        tiny_images.write(
            self.paths.project / "stages/one.yaml",
            "description: other\nparent: base\ntemplate: child.j2\nmods: [hello]\n",
        )
        one = self.stage_one(base, '"""Made up."""\nVALUE = 2\n')
        return self.release(one, ["--port", "8001", "--loud"], checkpoint="d")

    def stage_one(self, base: BuildRecord, text: str) -> BuildRecord:
        layer = (
            PathEntry("etc/gone", "whiteout", 0, 0, 0, 0),
            file("opt/vllm/pyvenv.cfg", "replaced\n"),
            file("opt/data.txt", "data\n"),
            *wheel_layer("sparkpin_hello", text, "0.1.0"),
        )
        layer = tuple(
            dataclasses.replace(entry, owner="wheel:sparkpin-hello" if entry.owner else "") for entry in layer
        )
        data = BuildInput(path="extra/data.txt", sha256=sha("data\n"), size=5, what="list of wheels")
        return self.record("one", base, [("hello", layer)], [data, self.mod(text)])


def sections(found: Difference, *, all_files: bool = False) -> dict[str, list[str]]:
    """Title (without counts) -> its lines."""
    told: dict[str, list[str]] = {}
    title = ""
    for line in difference_lines(found, all_files=all_files):
        if not line.startswith(" ") and line:
            title = line.partition(":")[0]
            told[title] = []
        elif line:
            told[title].append(re.sub(r" +", " ", line.strip()))
    return told
