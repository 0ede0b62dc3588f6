"""`why` on a release that no engine has built: its records are real, its listings made up."""

from __future__ import annotations

from pathlib import Path

import pytest
from evidence_samples import LOCK, Sample, make_sample

from sparkpin.build.record import layer_file, write_record
from sparkpin.core.errors import InputError
from sparkpin.history.why import PathOrigin, find_origin, origin_lines
from sparkpin.image.listing import Contents, PathEntry, write_contents

SITE = "opt/vllm/lib/python3.11/site-packages"
MOD, TORCH = f"{SITE}/sparkpin_hybrid/__init__.py", f"{SITE}/torch/__init__.py"


def file(path: str, owner: str = "") -> PathEntry:
    return PathEntry(path, "file", 0o644, 0, 0, 1, sha256="0" * 64, owner=owner)


LISTINGS: dict[str, Contents] = {  # by layer
    "root file system": (
        PathEntry("bin", "symlink", 0o777, 0, 0, 0, link="usr/bin"),
        *(file("usr/bin/bash", "deb:bash"), file("usr/bin/awk"), file("etc/gone"), file("var/odd\udcff")),
    ),
    "torch": (file(TORCH, "wheel:torch"), file("opt/vllm/pyvenv.cfg")),
    "hybrid-int4-fp8": (
        PathEntry("etc/gone", "whiteout", 0, 0, 0, 0),
        *(file("opt/vllm/pyvenv.cfg"), file(MOD, "wheel:hybrid")),
    ),
}


def layers_of(sample: Sample) -> list[str]:
    return ["root file system", *(layer.name for record in sample.records for layer in record.layers)]


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    made = make_sample(tmp_path)
    for name, diff_id in zip(layers_of(made), made.release.diff_ids, strict=True):
        write_contents(layer_file(made.paths, diff_id), LISTINGS.get(name, ()))
    return made


def facts(origin: PathOrigin) -> tuple[object, ...]:
    """Layer, package, what locks it."""
    layer, package = origin.layer, origin.package
    named = (f"{package.kind} {package.name}", package.lock) if package else ("", "")
    return ((layer.name, layer.stage) if layer else None, *named)


LOWEST, HIGHEST = ("root file system", "base"), ("hybrid-int4-fp8", "hybrid")
FOUND: dict[str, tuple[object, ...]] = {
    f"/{TORCH}": (("torch", "base"), "wheel torch", LOCK),
    "/usr/bin/bash": (LOWEST, "deb bash", LOCK),
    "/usr/bin/awk": (LOWEST, "", ""),
    "/opt/vllm/pyvenv.cfg": (HIGHEST, "", ""),
    f"/{MOD}": (HIGHEST, "mod hybrid-int4-fp8", ""),
    "/opt/vllm/lib": (None, "", ""),
}


@pytest.mark.parametrize("path", FOUND)
def test_where_a_path_comes_from(sample: Sample, path: str) -> None:
    origin = find_origin(sample.paths, sample.release.tag, path)
    assert facts(origin) == FOUND[path]
    if origin.layer:
        assert layers_of(sample)[origin.layer.number - 1] == origin.layer.name


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/opt/vllm/site-packages/torch/__init__.py", f"/{TORCH}"),
        ("/bin/bash", "/usr/bin/bash"),  # /bin is a link
        ("/etc/gone", "invoke why"),  # an upper layer deletes it
    ],
)
def test_a_path_that_no_layer_has_names_its_neighbours(sample: Sample, path: str, near: str) -> None:
    with pytest.raises(InputError) as error:
        find_origin(sample.paths, sample.release.tag, path)
    assert near in error.value.next_step


def test_what_a_terminal_would_obey_is_escaped(sample: Sample) -> None:
    """The version of a package is text of whoever made the bundle."""
    record = sample.records[0]
    assert record.rootfs
    debs = [deb.model_copy(update={"version": "1\x1b[2J"}) for deb in record.rootfs.debs]
    write_record(sample.paths, record.model_copy(update={"rootfs": record.rootfs.model_copy(update={"debs": debs})}))
    for path in ("/usr/bin/bash", "/var/odd\udcff"):
        assert all(line.isprintable() for line in origin_lines(find_origin(sample.paths, sample.release.tag, path)))
