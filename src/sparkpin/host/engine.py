"""The Docker engine: images through its API, builds through `buildkit`. Failures become EngineError or DiskError.

DOCKER_HOST is honoured, else the engine of the CLI's current context, else the default socket.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import docker
import docker.errors
import requests

from sparkpin.core.errors import DiskError, EngineError, HostError
from sparkpin.core.files import CHUNK
from sparkpin.core.names import platform_of
from sparkpin.core.paths import Paths
from sparkpin.core.progress import UNPACKS, progress
from sparkpin.host import buildkit, daemon
from sparkpin.host.content_store import NO_SIZES, Sizes, stored_layers
from sparkpin.host.images import ImageInfo
from sparkpin.image.archive import Slice, batched
from sparkpin.image.oci import OciImage, OciLayer
from sparkpin.image.seal import Part, seal

CONNECT_SECONDS = 30
QUESTION_SECONDS = 120  # for what only reads: inspect, list, version
WORK_SECONDS = 3600  # without an answer: an engine with a slow disk is silent for minutes while it loads an image


class Api(docker.APIClient):
    """Docker's API, whose plain questions have a limit of their own."""

    def request(self, *words: Any, **options: Any) -> requests.Response:
        if words[0] == "GET" and not options.get("stream"):
            options["timeout"] = min(options["timeout"] or WORK_SECONDS, QUESTION_SECONDS)
        return super().request(*words, **options)


class Client(docker.DockerClient):
    def __init__(self, *args: Any, **options: Any) -> None:
        self.api = Api(*args, **options)


class Engine:
    """A connected engine. `client` is the Docker SDK's client.

    host: the environment that leads the CLI to the same engine.
    """

    def __init__(self, client: docker.DockerClient, host: Mapping[str, str]) -> None:
        self.client, self.host = client, host

    @classmethod
    def at(cls, url: str) -> Engine:
        return cls.connect({"DOCKER_HOST": url})

    @classmethod
    def connect(cls, host: Mapping[str, str] | None = None) -> Engine:
        """The engine of an environment, which answers; None: the one to build and serve with. EngineError when none
        does; HostError when the user may not talk to it, or named one that cannot be used: it is theirs, so no other
        takes its place."""
        named = daemon.named_engine() if host is None else None
        host = daemon.environment() if host is None else host
        url = host.get("DOCKER_HOST") or ""
        if url.startswith("ssh://"):  # the SDK takes it by paramiko alone, and folders are mounted from this machine
            step = f"{daemon.USE_OWN}, or run sparkpin over there; `invoke export TAG {url}` sends it a release"
            raise HostError(f"got the Docker engine {url}, expected one that is reached without ssh", next_step=step)
        try:
            with engine_errors(f" at {url or 'the default socket'}"):
                client: Any = Client.from_env(timeout=CONNECT_SECONDS, environment=dict(host))
        except EngineError as error:
            if named:
                raise HostError(error.message, next_step=f"start that engine, or {daemon.USE_OWN}") from None
            raise
        client.api.timeout = WORK_SECONDS
        engine = cls(client, host)
        if client.api.base_url.startswith("http+docker://"):  # a socket: no proxy and no .netrc to look for each time
            client.api.trust_env = False
            # It maps users, and nobody has tried what that does to the owners of layers' files and of checkpoints.
            if named and any("rootless" in option for option in engine.info.get("SecurityOptions") or ()):
                lack = f"the Docker engine at {named} is rootless, expected one that runs as root"
                raise HostError(lack, next_step=daemon.USE_OWN)
        return engine

    @cached_property
    def info(self) -> dict[str, Any]:
        with engine_errors():
            found: dict[str, Any] = self.client.info()
        return found

    @property
    def version(self) -> str:
        return str(self.info["ServerVersion"])

    @property
    def platform(self) -> str:
        """Of the machine that the engine runs on, as "linux/arm64"."""
        return platform_of(self.info["Architecture"])

    @cached_property
    def elsewhere(self) -> str:
        """The machine that it runs on, "" for this one: only there does a folder that is mounted exist.

        The address of a named engine does not decide: a socket may be forwarded from another machine, and tcp may lead
        back to this one.
        """
        if self.host.get("DOCKER_HOST") in daemon.DEFAULT_HOSTS:
            return ""
        here = (socket.gethostname(), platform.release(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        there = tuple(self.info.get(key) for key in ("Name", "KernelVersion", "MemTotal"))
        return "" if here == there else str(there[0] or "another machine")

    @property
    def keeps_layers(self) -> bool:
        """Whether images stand on layers (overlay2 and its like) and not on containerd's content store."""
        status = self.info.get("DriverStatus") or []
        return not any("containerd.snapshotter" in str(value) for _, value in status)

    def image(self, ref: str) -> ImageInfo | None:
        """What the engine has under `ref`, or None."""
        api: Any = self.client.api
        with engine_errors():
            try:
                found, history = api.inspect_image(ref), api.history(ref)
            except docker.errors.ImageNotFound:
                return None
        return ImageInfo.of(found, history[::-1], keeps_layers=self.keeps_layers)

    def images(self) -> list[ImageInfo]:
        """Every image of the engine, other people's included. One that is removed meanwhile is left out."""
        with engine_errors():
            ids = dict.fromkeys(entry["Id"] for entry in self.client.api.images())
        return [image for image_id in ids if (image := self.image(image_id))]

    def tag(self, ref: str, new: str) -> None:
        repository, _, name = new.rpartition(":")
        with engine_errors():
            self.client.api.tag(ref, repository, name)

    def untag(self, ref: str) -> None:
        """Remove a tag, and the image when it was the last one and nothing stands on it. An absent tag is no error."""
        with engine_errors(), contextlib.suppress(docker.errors.ImageNotFound):
            self.client.api.remove_image(ref)

    def save(self, ref: str, out: IO[bytes], saved: Callable[[int], object] = lambda count: None) -> None:
        """`docker save` of one image. saved: gets the bytes of each piece, once the engine has gathered them."""
        with engine_errors():
            for chunk in counted(self.client.api.get_image(ref, chunk_size=CHUNK), saved):
                out.write(chunk)

    def load(self, pieces: Iterator[bytes]) -> None:
        """`docker load` of an archive's bytes."""
        with engine_errors():
            for event in self.client.api.load_image(pieces, quiet=True):  # type: ignore[no-untyped-call]
                if error := event.get("error"):
                    raise refused(error)

    def load_sealed(
        self,
        parts: Sequence[Part],
        config: Mapping[str, Any],
        *,
        os: str,
        architecture: str,
        tag: str,
        sizes: Sizes = NO_SIZES,
    ) -> OciImage:
        """Seal and load in one pass, without a copy on the disk. The tag appears when all of it is in.

        sizes: notes that containerd's store is read and written with. Raises EngineError when the engine lacks a layer
        that is left out; see `image_above`.
        """
        new = [part for part in parts if not isinstance(part, str)]
        below = None if self.keeps_layers else self.blobs([part for part in parts if isinstance(part, str)], sizes)
        sealed: list[OciImage] = []

        def pieces() -> Iterator[bytes]:
            archive = seal(parts, config, os=os, architecture=architecture, tag=tag, below=below)
            sealed.append((yield from archive))

        is_new = self.image(tag) is None
        try:
            with progress(sum(part.size for part in new), after=UNPACKS) as sent:
                self.load(counted(batched(pieces()), sent))
        except BaseException:
            if is_new:  # containerd's store tags what it takes in before it unpacks it
                with contextlib.suppress(EngineError):  # it must not hide why the load failed
                    self.untag(tag)
            raise
        if below is not None:
            above = sealed[0].diff_ids[len(below) :]
            below += [OciLayer(diff_id, part.size) for diff_id, part in zip(above, new, strict=True)]
            sizes.add(sealed[0].diff_ids, below)
        return sealed[0]

    def blobs(self, diff_ids: Sequence[str], sizes: Sizes) -> list[OciLayer]:
        """What containerd's store has for the lowest layers of an image."""
        if not diff_ids:
            return []
        if not (found := self.image_above(diff_ids)):
            raise EngineError(f"no image of the engine has the layers up to {diff_ids[-1]}", next_step="invoke build")
        with engine_errors():
            return stored_layers(found, sizes, self.client.api.get_image)[: len(diff_ids)]

    def image_above(self, diff_ids: Sequence[str]) -> ImageInfo | None:
        """The smallest image that stands on these layers, lowest first: an archive may leave them out. Rather a sealed
        one: its manifest follows from notes, and that of BuildKit's own image would have to be read (`stored_layers`).
        """
        found = [image for image in self.images() if image.diff_ids[: len(diff_ids)] == tuple(diff_ids)]
        return min(found, key=lambda image: (len(image.diff_ids), image.config_digest == image.id), default=None)

    def import_rootfs(self, tar: Path, ref: str, *, architecture: str, labels: Mapping[str, str]) -> ImageInfo:
        """Load a root file system's tar, as it is, as an image of one layer.

        Not `docker import`: that dates the image, and before 23 it takes every image for the host's architecture.
        """
        with tar.open("rb") as file:
            layer = Slice(file, 0, tar.stat().st_size)
            config = {"Labels": dict(labels)}
            self.load_sealed([layer], config, os="linux", architecture=architecture, tag=ref)
        image = self.image(ref)
        assert image
        return image

    @contextlib.contextmanager
    def exported(self, ref: str, came: Callable[[int], object]) -> Iterator[Iterator[bytes]]:
        """All files of an image as one archive, in pieces, as a container would see them, through one that is made and
        never started. came: gets the bytes of each piece."""
        with engine_errors():
            container = self.client.containers.create(ref, ["-"], network_mode="none")
            try:
                yield counted(container.export(chunk_size=CHUNK), came)  # type: ignore[arg-type]  # it gives bytes
            finally:
                container.remove(force=True)


def counted(pieces: Iterable[bytes], done: Callable[[int], object]) -> Iterator[bytes]:
    for piece in pieces:
        yield piece
        done(len(piece))


@contextlib.contextmanager
def engine_errors(where: str = "") -> Iterator[None]:
    """Docker's errors as ours: what an engine answered, and what kept it from answering. where: such as " at URL"."""
    try:
        yield
    except docker.errors.APIError as error:
        raise refused(str(error.explanation or error)) from None
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        if isinstance(error, docker.errors.DockerException) and not isinstance(error.__cause__, Exception):
            raise refused(str(error)) from None
        if "PermissionError" in str(error):
            step = "sudo usermod -aG docker $USER, then log in again"
            raise HostError(f"no permission to talk to the Docker engine{where}", next_step=step) from None
        late = f" within {QUESTION_SECONDS} s" if isinstance(error, requests.exceptions.ReadTimeout) else ""
        raise EngineError(f"no Docker engine answers{where}{late}", next_step="invoke doctor") from None


def refused(text: str) -> EngineError | DiskError:
    """The engine's words as an error that names the next command."""
    if re.search(r"no space left on device|disk quota exceeded", text, re.I):
        return buildkit.disk_full(f" {text.strip()}")
    return EngineError(f"the Docker engine refused: {text.strip()}", next_step="invoke doctor")


def engine_of(paths: Paths) -> Engine:
    """The engine, started when none answers and this user may start one."""
    try:
        return Engine.connect()
    except EngineError:
        daemon.start_engine(paths)
        return Engine.connect()
