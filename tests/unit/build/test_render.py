"""Rendering is pure: one project, one set of Dockerfiles and keys; whatever decides an image changes its key."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path, PosixPath

import pytest
import tiny_images
from tiny_images import locked, make_mod, make_project, stack_lock

from sparkpin.build import render
from sparkpin.core.errors import BuildError, ManifestError
from sparkpin.pins import mods, schema
from sparkpin.pins.manifests import load_chain, load_stack

GOLDEN = """\
FROM PARENT AS venv
RUN ["/bin/sh", "-c", "echo building; while read line; do echo $line; done </proc/net/dev >/tmp/net"]
FROM scratch AS venv-tree
COPY --from=venv /tmp/net /opt/net
FROM PARENT AS config
ENV GREETING=hello
USER 10001:10001
LABEL sparkpin.stage="base" sparkpin.key="KEY"
FROM config
COPY --from=venv-tree / /
"""


def rendered(
    project: Path, wheels: tuple[schema.LockedFile, ...] = (), stage: str = "two"
) -> tuple[render.RenderedImage, ...]:
    stack = load_stack(project, "tiny")
    wheels = wheels or locked("alpha", "beta")
    return render.render_chain(project, stack, stack_lock(stack, wheels), load_chain(project, stage))


def keys(project: Path, wheels: tuple[schema.LockedFile, ...] = ()) -> list[str]:
    return [image.key for image in rendered(project, wheels)]


def test_dockerfile_is_the_template_filled_in(tmp_path: Path) -> None:
    base = rendered(make_project(tmp_path))[0]
    assert base.dockerfile.replace(base.parent_ref, "PARENT").replace(base.key, "KEY") == GOLDEN


def test_chain_is_linked(tmp_path: Path) -> None:
    base, one, two = rendered(make_project(tmp_path))
    assert base.parent_key is None and base.parent_ref.startswith("sparkpin/rootfs:bookworm-")
    assert (one.parent_key, one.parent_ref) == (base.key, base.ref)
    assert (two.parent_key, two.parent_ref) == (one.key, one.ref)
    assert base.ref == f"sparkpin/stack-tiny:base-{base.key[:12]}"
    assert [name for name, _ in base.layers] == ["venv", "first", "rest"]
    assert [name for name, _ in one.layers] == ["hello"] and two.layers == () and two.context == ()


def test_context_lists_every_file_with_its_hash(tmp_path: Path) -> None:
    base = rendered(make_project(tmp_path))[0]
    assert [(file.path, type(file.source)) for file in base.context] == [
        ("tools/install.py", PosixPath),
        ("tools/uv", PosixPath),
        ("wheels/first/alpha-1.0-py3-none-any.whl", schema.LockedFile),
        ("wheels/first/requirements.txt", str),
        ("wheels/rest/beta-1.0-py3-none-any.whl", schema.LockedFile),
        ("wheels/rest/requirements.txt", str),
    ]
    assert base.context[3].source == f"alpha==1.0 --hash=sha256:{'a' * 64}\n"


def date_all(folder: Path, moment: int) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (moment, moment))


def edit(path: str, text: str) -> Callable[[Path], None]:
    return lambda project: tiny_images.write(project / path, (project / path).read_text() + text)


@pytest.mark.parametrize(
    ("change", "first_changed"),
    [
        pytest.param(edit("mods/hello/sparkpin_hello/__init__.py", "#\n"), 1, id="a mod's line"),
        pytest.param(lambda p: (p / "mods/hello/sparkpin_hello/new.py").touch(), 1, id="a mod's new file"),
        pytest.param(lambda p: (p / "mods/hello/sparkpin_hello/__init__.py").chmod(0o755), 1, id="a mod's file mode"),
        pytest.param(edit("dockerfiles/base.j2", "#\n"), 0, id="the first template"),
        pytest.param(edit("dockerfiles/install.py", "#\n"), 0, id="the installer"),
        pytest.param(
            lambda p: tiny_images.write(
                p / "pins/stacks/tiny.yaml", tiny_images.STACK.replace("linux/amd64", "linux/arm64")
            ),
            0,
            id="the platform",
        ),
        pytest.param(edit("mods/hello/README.md", "more\n"), 3, id="not with a README"),
        pytest.param(edit("mods/hello/tests/test_it.py", "#\n"), 3, id="not with a test"),
        pytest.param(
            lambda p: tiny_images.write(p / "mods/hello/sparkpin_hello/__pycache__/x.pyc", "x"), 3, id="not bytecode"
        ),
        pytest.param(lambda p: date_all(p, 1), 3, id="not with times"),
    ],
)
def test_key_changes_with(tmp_path: Path, change: Callable[[Path], None], first_changed: int) -> None:
    before = keys(make_project(tmp_path))
    change(tmp_path)
    after = keys(tmp_path)
    assert [old == new for old, new in zip(before, after, strict=True)] == [n < first_changed for n in range(3)]


def test_key_changes_with_a_locked_wheel(tmp_path: Path) -> None:
    make_project(tmp_path)
    alpha, beta = locked("alpha", "beta")
    other = (alpha, beta.model_copy(update={"sha256": "f" * 64}))
    before, after = rendered(tmp_path, (alpha, beta)), rendered(tmp_path, other)
    assert all(old.key != new.key for old, new in zip(before, after, strict=True))
    layers = [old == new for old, new in zip(before[0].layers, after[0].layers, strict=True)]
    assert layers == [True, True, False], "the layers that do not hold the wheel stay as they are"


def test_key_does_not_depend_on_where_the_project_lies(tmp_path: Path) -> None:
    assert keys(make_project(tmp_path / "here")) == keys(make_project(tmp_path / "over/there"))


def test_a_layer_of_an_unlocked_distribution_is_told(tmp_path: Path) -> None:
    with pytest.raises(ManifestError) as caught:
        rendered(make_project(tmp_path), locked("beta"))
    assert (caught.value.key, caught.value.got) == ("python.layers", ["alpha"])


def test_wheel_is_the_same_twice_and_has_no_readme(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p")
    built: list[Path] = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        date_all(project, len(built) * 10**6)
        tiny_images.write(project / "mods/hello/README.md", f"version {name} of the text\n")
        built.append(mods.build_wheel(mods.read_mod(project, "hello"), folder))
    assert built[0].read_bytes() == built[1].read_bytes()
    assert b"of the text" not in built[0].read_bytes()


@pytest.mark.parametrize("place", ["mods/hello", "path"])
def test_no_other_module_is_taken_for_the_backend(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the mod's own nor one of the caller's PYTHONPATH."""
    make_mod(tmp_path, "hello")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    tiny_images.write(tmp_path / place / "flit_core/__init__.py", f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "out").mkdir()
    assert mods.build_wheel(mods.read_mod(tmp_path, "hello"), tmp_path / "out").is_file()
    assert not (tmp_path / "ran").exists()


def test_a_mod_that_makes_no_wheel_is_told(tmp_path: Path) -> None:
    make_mod(tmp_path, "broken")
    (tmp_path / "mods/broken/sparkpin_broken/__init__.py").unlink()
    (tmp_path / "out").mkdir()
    with pytest.raises(BuildError, match=r"(?s)flit_core.buildapi made no wheel.*sparkpin_broken"):
        mods.build_wheel(mods.read_mod(tmp_path, "broken"), tmp_path / "out")


@pytest.mark.parametrize("text", ["{{ nobody }}", "{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__.os }}"])
def test_template_that_cannot_be_filled_in(tmp_path: Path, text: str) -> None:
    """The last two reach for the interpreter: an imported release brings templates of somebody else."""
    project = tiny_images.make_project(tmp_path)
    (project / "dockerfiles/child.j2").write_text(text)
    with pytest.raises(ManifestError) as caught:
        rendered(project)
    assert caught.value.file.endswith("child.j2") and caught.value.key == "template"
    assert str(caught.value.got).startswith(("UndefinedError", "TemplateSyntaxError", "SecurityError"))
