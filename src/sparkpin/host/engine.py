"""The Docker engine: images through its API, builds through `buildkit`. Failures become EngineError or DiskError.

DOCKER_HOST is honoured, else the engine of the CLI's current context, else the default socket.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import docker
import docker.errors
import requests

from sparkpin.core.errors import DiskError, EngineError
from sparkpin.core.files import CHUNK, sha256_file
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host import buildkit, daemon
from sparkpin.host.content_store import (
    NO_SIZES,
    Blob,
    OciIndex,
    Sizes,
    image_index,
    image_manifest,
    plain_blobs,
    read_blobs,
)
from sparkpin.host.endpoint import elsewhere, environment
from sparkpin.image.layer_tar import Slice
from sparkpin.image.seal import CREATED, CREATED_BY, Sealed, SealedLayer, digest_of, image_config, seal

CONNECT_TIMEOUT = 30  # seconds
TIMEOUT = 3600  # seconds without an answer: an engine with a slow disk is silent for minutes while it loads an image


@dataclass(frozen=True)
class ImageInfo:
    """An image as the engine has it. config_digest: SHA-256 of its configuration ("sha256:..."); size: bytes."""

    ref: str
    config_digest: str
    diff_ids: tuple[str, ...]
    size: int
    created: str
    labels: Mapping[str, str]
    os: str
    architecture: str
    config: Mapping[str, Any]
    tags: frozenset[str] = frozenset()


class Engine:
    """A connected engine. `client` is the plain Docker SDK client, `containers` its containers.

    host: the environment that leads the CLI to the same engine.
    """

    def __init__(self, client: docker.DockerClient, host: Mapping[str, str] | None = None) -> None:
        self.client = client
        self.host = environment() if host is None else host

    @classmethod
    def at(cls, url: str) -> Engine:
        with engine_errors():
            return cls(docker.DockerClient(base_url=url, timeout=TIMEOUT), {"DOCKER_HOST": url})

    @classmethod
    def connect(cls) -> Engine:
        """Raises EngineError when no engine answers or the user may not talk to it."""
        with engine_errors():
            client = docker.DockerClient.from_env(timeout=CONNECT_TIMEOUT, environment=environment())
        client.api.timeout = TIMEOUT
        if client.api.base_url.startswith("http+docker://"):  # a socket: no proxy and no .netrc to look for each time
            client.api.trust_env = False
        return cls(client)

    @property
    def containers(self) -> Any:
        return self.client.containers

    @property
    def version(self) -> str:
        with engine_errors():
            return str(self.client.version()["Version"])

    @cached_property
    def elsewhere(self) -> str:
        """The machine that it runs on, "" for this one: only there does a folder that is mounted exist."""
        with engine_errors():
            return elsewhere(self.host.get("DOCKER_HOST"), self.client.info())

    @cached_property
    def keeps_layers(self) -> bool:
        """Whether images stand on layers (overlay2 and its like) and not on containerd's content store."""
        with engine_errors():
            status = self.client.info().get("DriverStatus") or []
        return not any("containerd.snapshotter" in str(value) for _, value in status)

    def image(self, ref: str) -> ImageInfo | None:
        """What the engine has under `ref`, or None.

        Where containerd keeps the images their Id is not the configuration's digest: there it is worked out for sealed
        images, and other images have their Id in its place.
        """
        with engine_errors():
            try:
                found: dict[str, Any] = self.client.api.inspect_image(ref)  # type: ignore[no-untyped-call]
            except docker.errors.ImageNotFound:
                return None
        config, diff_ids = found.get("Config") or {}, tuple(found["RootFS"].get("Layers") or ())
        digest = found["Id"]
        if not self.keeps_layers and self.is_sealed(found):
            digest = digest_of(config_of(found))
        return ImageInfo(
            ref=ref,
            config_digest=digest,
            diff_ids=diff_ids,
            size=found["Size"],
            created=found.get("Created") or "",
            labels=config.get("Labels") or {},
            os=found["Os"],
            architecture=found["Architecture"],
            config=config,
            tags=frozenset(found.get("RepoTags") or ()),
        )

    def is_sealed(self, found: Mapping[str, Any]) -> bool:
        """Whether an image that was inspected has the dates and the history that sealing gives."""
        with engine_errors():
            events = self.client.api.history(found["Id"])  # type: ignore[no-untyped-call]
        return found.get("Created") == CREATED and [event["CreatedBy"] for event in events] == [CREATED_BY] * len(
            found["RootFS"].get("Layers") or ()
        )

    def tag(self, ref: str, new: str) -> None:
        repository, _, name = new.rpartition(":")
        with engine_errors():
            self.client.api.tag(ref, repository, name)

    def untag(self, ref: str) -> None:
        """Remove a tag, and the image when it was the last one and nothing stands on it. An absent tag is no error."""
        with engine_errors(), contextlib.suppress(docker.errors.ImageNotFound):
            self.client.api.remove_image(ref)

    def has_layers(self, diff_ids: Sequence[str]) -> bool:
        """Whether an image stands on these layers, lowest first, so that an archive may leave them out."""
        with engine_errors():
            for image_id in {entry["Id"] for entry in self.client.api.images()}:
                with contextlib.suppress(docker.errors.ImageNotFound):  # removed meanwhile
                    details = self.client.api.inspect_image(image_id)  # type: ignore[no-untyped-call]
                    if (details["RootFS"].get("Layers") or [])[: len(diff_ids)] == list(diff_ids):
                        return True
        return False

    def save(self, ref: str, out: IO[bytes], saved: Callable[[int], object] = lambda count: None) -> None:
        """`docker save` of one image. saved: is told the bytes as they come, once the engine has gathered them."""
        with engine_errors():
            for chunk in self.client.api.get_image(ref, chunk_size=CHUNK):
                out.write(chunk)
                saved(len(chunk))

    def load(self, pieces: Iterator[bytes]) -> None:
        """`docker load` of an archive's bytes."""
        with engine_errors():
            for event in self.client.api.load_image(pieces, quiet=True):  # type: ignore[no-untyped-call]
                if error := event.get("error"):
                    raise plain_error(error)

    def load_sealed(
        self,
        parts: Sequence[SealedLayer],
        config: Mapping[str, Any],
        *,
        os: str,
        architecture: str,
        tag: str,
        sizes: Sizes = NO_SIZES,
        meanwhile: Callable[[Sealed], object] = lambda sealed: None,
        sent: Callable[[int], object] = lambda count: None,
    ) -> Sealed:
        """Seal and load in one pass, without a copy on the disk. The tag appears when all of it is in.

        sizes: notes that containerd's store is read and written with. meanwhile: runs when all is sent and the engine
        still unpacks. sent: is told the bytes as they go. Raises EngineError when the engine lacks a layer that is left
        out.
        """
        made: list[Sealed] = []
        nameless: list[OciIndex] = []  # what containerd's store takes in by an index has no tag yet
        below = [] if self.keeps_layers else self.blobs([part.diff_id for part in parts if part.left_out], sizes)

        def more(sealed: Sealed) -> Mapping[str, bytes]:
            if self.keeps_layers:
                return {}
            nameless.append(image_index(sealed, parts, below))
            return nameless[0].members

        def produce(write: Callable[[bytes | memoryview], object]) -> None:
            def counted(data: bytes | memoryview) -> None:
                write(data)
                sent(len(data))

            made.append(seal(counted, parts, config, os=os, architecture=architecture, tag=tag, more=more))

        try:
            with pieces_of(produce, lambda: meanwhile(made[0])) as pieces:
                self.load(pieces)
            for index in nameless:
                self.tag(index.digest, tag)
        except BaseException:
            for index in nameless:
                with contextlib.suppress(EngineError):  # it must not hide why the load failed
                    self.remove_nameless(index.digest)
            raise
        for index in nameless:
            sizes.keep(made[0].diff_ids, index.blobs)
        return made[0]

    def remove_nameless(self, image_id: str) -> None:
        """Remove what a load left that could not unpack what it took in."""
        with engine_errors(), contextlib.suppress(docker.errors.ImageNotFound):
            if not self.client.api.inspect_image(image_id).get("RepoTags"):  # type: ignore[no-untyped-call]
                self.client.api.remove_image(image_id)

    def blobs(self, diff_ids: Sequence[str], sizes: Sizes) -> list[Blob]:
        """What containerd's store has for the lowest layers of an image, from the smallest image that has them all."""
        if not diff_ids:
            return []
        found: list[dict[str, Any]] = []
        with engine_errors():
            for image_id in {entry["Id"] for entry in self.client.api.images()}:
                with contextlib.suppress(docker.errors.ImageNotFound):  # removed meanwhile
                    details = self.client.api.inspect_image(image_id)  # type: ignore[no-untyped-call]
                    if (details["RootFS"].get("Layers") or [])[: len(diff_ids)] == list(diff_ids):
                        found.append(details)
        if not found:
            raise EngineError(f"no image of the engine has the layers up to {diff_ids[-1]}", next_step="invoke build")
        found.sort(key=lambda details: len(details["RootFS"]["Layers"]))
        for details in found:
            layers = details["RootFS"]["Layers"]
            blobs = plain_blobs(layers, sizes)
            if blobs and digest_of(image_manifest(config_of(details), blobs)) == details["Id"]:
                return blobs[: len(diff_ids)]
        with engine_errors():
            blobs = read_blobs(self.client.api.get_image(found[0]["Id"], chunk_size=CHUNK))
        sizes.keep(found[0]["RootFS"]["Layers"], blobs)
        return blobs[: len(diff_ids)]

    @property
    def platform(self) -> str:
        """Of the machine that the engine runs on, as "linux/arm64"."""
        with engine_errors():
            version = self.client.version()
        return f"{version['Os']}/{version['Arch']}"

    def import_rootfs(
        self,
        tar: Path,
        ref: str,
        *,
        architecture: str,
        labels: Mapping[str, str],
        sent: Callable[[int], object] = lambda count: None,
    ) -> ImageInfo:
        """Load a root file system's tar, as it is, as an image of one layer.

        Not `docker import`: that dates the image, and before 23 it takes every image for the host's architecture.
        """
        digest, size = sha256_file(tar)
        with tar.open("rb") as file:
            part = SealedLayer(f"sha256:{digest}", raw=Slice(file, 0, size))
            config = {"Labels": dict(labels)}
            self.load_sealed([part], config, os="linux", architecture=architecture, tag=ref, sent=sent)
        image = self.image(ref)
        if image is None:
            raise EngineError(f"the engine took {ref} and does not have it", next_step="invoke doctor")
        return image


def config_of(found: Mapping[str, Any]) -> bytes:
    return image_config(
        found.get("Config") or {},
        os=found["Os"],
        architecture=found["Architecture"],
        diff_ids=found["RootFS"].get("Layers") or (),
    )


@contextlib.contextmanager
def engine_errors() -> Iterator[None]:
    try:
        yield
    except docker.errors.APIError as error:
        raise plain_error(str(error.explanation or error)) from None
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        raise plain_error(str(error)) from None


def plain_error(text: str) -> EngineError | DiskError:
    """The engine's words, or an exception's, as an error that says what to do."""
    where = os.environ.get("DOCKER_HOST") or "the default socket"
    if re.search(r"no space left on device|disk quota exceeded", text, re.I):
        return buildkit.disk_full(f" {text.strip()}")
    if re.search(r"PermissionError|permission denied while trying to connect", text, re.I):
        return EngineError(f"no permission to talk to the Docker engine at {where}", next_step=daemon.JOIN_GROUP)
    if re.search(
        r"Error while fetching server API version|Connection ?(?:refused|aborted|Error)|FileNotFoundError|"
        r"Cannot connect to the Docker daemon|Max retries|Name or service not known",
        text,
    ):
        return EngineError(f"no Docker engine answers at {where}", next_step="invoke doctor")
    return EngineError(f"the Docker engine refused: {text.strip()}", next_step="invoke doctor")


@contextlib.contextmanager
def pieces_of(
    produce: Callable[[Callable[[bytes | memoryview], object]], None], afterwards: Callable[[], object]
) -> Iterator[Iterator[bytes]]:
    """What `produce` writes, as pieces to read, through a pipe; it and then `afterwards` run in a thread of their own.

    An exception of `produce` comes out of the reading, so that a request that sends the pieces breaks off.
    """
    reading, writing = os.pipe()
    closed = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with os.fdopen(writing, "wb", buffering=CHUNK) as pipe:
                produce(pipe.write)
            closed.set()
            afterwards()
        except BaseException as error:
            failed.append(error)
            closed.set()

    thread = threading.Thread(target=run, name="seal", daemon=True)

    def read() -> Iterator[bytes]:
        while chunk := os.read(reading, CHUNK):
            yield chunk
        closed.wait()
        if failed:
            raise failed[0]

    thread.start()
    try:
        yield read()
    finally:
        os.close(reading)  # a reader that gave up ends the writer, too
        thread.join()
    if failed and isinstance(failed[0], BrokenPipeError):  # which would pass for `| head`
        raise EngineError("the engine did not read all that it was sent", next_step="run the same again")
    if failed:
        raise failed[0]


def engine_of(paths: Paths) -> Engine:
    """The engine, started when none answers and this user may start one."""
    try:
        return Engine.connect()
    except EngineError:
        daemon.start_engine(paths, say)
        return Engine.connect()
