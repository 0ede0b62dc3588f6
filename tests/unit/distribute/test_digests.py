"""Published digests: those of this checkout fit its pins, and an image is compared with them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from evidence_samples import Sample, make_sample, pairings
from places import PROJECT

from sparkpin.core.errors import ManifestError
from sparkpin.distribute import digests
from sparkpin.distribute.digests import Published, PublishedImage, compare, entry_of, load, rows
from sparkpin.pins import manifests

MAIN = {"base", "hybrid", "mtp", "v2", "v2-tq"}
REPRODUCIBILITY = PROJECT / "docs/reproducibility.md"
STACKS = [path.stem for path in (PROJECT / digests.FOLDER).glob("*.yaml")]


@pytest.mark.parametrize("name", STACKS)
def test_every_entry_is_of_today_s_pins(name: str) -> None:
    """CI's word that `invoke lock --digests` ran after the last change of a pin, a mod or a stage."""
    published = load(PROJECT, name)
    assert published and set(published.images) >= ({"base"} if manifests.load_stack(PROJECT, name).build_on else MAIN)
    assert not digests.stale(PROJECT, name, published.images), "invoke lock --digests"


def test_what_is_of_other_pins_is_taken_out(tmp_path: Path) -> None:
    """And what is of a stage that is no more; the rest stays as it is."""
    for folder in ("stages", "pins/stacks", "dockerfiles", "mods"):
        shutil.copytree(PROJECT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "tests"))
    published = load(PROJECT, "cpu")
    assert published
    old = published.images["v2"].model_copy(update={"key": "0" * 64})
    digests.write(tmp_path, "cpu", {**published.images, "v2": old, "v1": old})
    assert digests.remove_stale(tmp_path, "cpu") == ["v2", "v1"]
    left = load(tmp_path, "cpu")
    assert left and left.images == {name: one for name, one in published.images.items() if name != "v2"}
    assert digests.remove_stale(tmp_path, "cpu") == []
    digests.write(tmp_path, "cpu", {"v2": old})
    assert digests.remove_stale(tmp_path, "cpu") == ["v2"]
    assert load(tmp_path, "cpu") is None


def test_the_documents_show_what_is_published() -> None:
    """The line of a build in docs/reproducibility.md; and no digest of an image that is not that of today's pins."""
    published = load(PROJECT, "cpu")
    line = re.search(r"^    same bytes as published: (.*) \((.*)\);", REPRODUCIBILITY.read_text(), re.M)
    assert published and line and line[2] == digests.file_of("cpu")
    assert line[1].split(", ") == [stage.name for stage in manifests.load_chain(PROJECT, "v2-tq")]
    known = {entry.image for name in STACKS for entry in load(PROJECT, name).images.values()}  # type: ignore[union-attr]
    for path in (PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))):
        for shown in re.findall(r"\bimage (?:sha256:)?([0-9a-f]{12,64})\b", path.read_text()):
            assert [one for one in known if one.startswith(f"sha256:{shown}")], f"{path.name} shows {shown}"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return make_sample(tmp_path_factory.mktemp("sample"))


def published_of(sample: Sample) -> Published:
    below, images = 0, dict[str, PublishedImage]()
    for record in sample.records:
        images[record.stage] = entry_of(record, below)
        below = len(record.diff_ids)
    return Published(images=images)


def test_what_is_written_is_read_again(sample: Sample, tmp_path: Path) -> None:
    made = published_of(sample)
    path = tmp_path / digests.file_of("cpu")
    assert load(tmp_path, "cpu") is None
    path.parent.mkdir(parents=True)
    text = "".join((digests.HEAD.format("cpu"), *rows(made.images)))
    path.write_text(text)
    assert load(tmp_path, "cpu") == made
    assert [*made.images["base"].layers][:2] == ["rootfs", "venv"]
    path.write_text(text.replace("sha256:", "md5:", 1))
    with pytest.raises(ManifestError, match=r"cpu\.yaml: images\.base\.image"):
        load(tmp_path, "cpu")


def test_an_image_is_compared_with_the_one_of_its_key(sample: Sample) -> None:
    """The same; another layer of its own or of the stage below, one too many, another configuration; other pins."""
    chain = [pairing.rendered for pairing in pairings("hybrid", sample.paths.project)]
    made, release = published_of(sample), sample.release
    compared = compare(made, chain, release.image, release.diff_ids)
    assert compared == digests.Comparison(release.image)
    other, changed = f"sha256:{'0' * 64}", list(release.diff_ids)
    names = [f"{name} of {stage}" for stage in ("base", "hybrid") for name in made.images[stage].layers]
    for place in (len(changed) - 1, 2, 0):
        changed[place] = other
        compared = compare(made, chain, other, changed)
        assert compared and compared.published == release.image
        assert names[place] in compared.difference and release.diff_ids[place] in compared.difference
    for image, ids in ((other, [*release.diff_ids, other]), (other, release.diff_ids[:-1]), (other, release.diff_ids)):
        compared = compare(made, chain, image, ids)
        assert compared and compared.difference
    for key, stage in (("0" * 64, "hybrid"), (chain[-1].key, "v2")):
        entry = made.images["hybrid"].model_copy(update={"key": key})
        assert compare(Published(images={stage: entry}), chain, other, changed) is None
    assert compare(None, chain, other, changed) is None
