"""What can go wrong, one class per kind of failure, each with its own exit code.

A message states the cause (file, key, value got, value expected); `next_step` is the command or act that comes next.
"""

from __future__ import annotations

from collections.abc import Sequence

WHOLE = "(whole file)"
"""The key of what is wrong with all of a file, or with none of its keys."""
LONGEST = 300  # characters of a value in a message


def short(value: object) -> str:
    """As Python writes it; of a long one the start."""
    return clipped(repr(value))


def clipped(text: str, longest: int = LONGEST) -> str:
    return f"{text[:longest]} ..." if len(text) > longest else text


class SparkpinError(Exception):
    """Base of every failure that a user can cause or meet. Exit code 1."""

    exit_code = 1
    label = "error"  # before the message

    def __init__(self, message: str, *, next_step: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.message}\n  next: {self.next_step}" if self.next_step else self.message


class InputError(SparkpinError):
    """A name, option or argument that does not exist or does not fit. Exit code 2."""

    exit_code = 2


class HostError(SparkpinError):
    """The machine lacks something: a package, rights, an engine that can be started. Exit code 3."""

    exit_code = 3


class ManifestError(SparkpinError):
    """A pin, lock, stage, recipe or model file contains something that cannot be right. Exit code 4.

    known: the keys that may stand where one stands that may not; empty for any other mistake. fault: without the place.
    """

    exit_code = 4

    def __init__(
        self, file: object, key: str, got: object, expected: str, *, next_step: str = "", known: Sequence[str] = ()
    ) -> None:
        if not next_step and str(file).endswith(".yaml"):  # people write those, and nothing else
            next_step = f"correct {file if key == WHOLE else f'{key} in {file}'}, then run the same command again"
        where = file if key == WHOLE else f"{file}: {key}"
        found = "" if key == WHOLE and isinstance(got, dict) else f"got {short(got)}, "
        self.fault = f"{found}expected {expected}"
        super().__init__(f"{where}: {self.fault}", next_step=next_step)
        self.file, self.key, self.got, self.expected, self.known = str(file), key, got, expected, tuple(known)


class IntegrityError(SparkpinError):
    """Bytes that are not the bytes that were locked. Exit code 5."""

    exit_code = 5

    @classmethod
    def mismatch(cls, what: str, got: tuple[str, int], expected: tuple[str, int], next_step: str) -> IntegrityError:
        """got, expected: SHA-256 (hex) and size in bytes."""
        sides = [f"size={size}, sha256={sha256}" for sha256, size in (got, expected)]
        return cls(f"{what}: got {sides[0]}, expected {sides[1]}", next_step=next_step)


class NetworkError(SparkpinError):
    """Something could not be fetched. Exit code 6."""

    exit_code = 6


class EngineError(SparkpinError):
    """The Docker engine does not answer or refuses. Exit code 7."""

    exit_code = 7


class BuildError(SparkpinError):
    """An image could not be built. Exit code 8."""

    exit_code = 8


class CheckpointError(SparkpinError):
    """A checkpoint's inputs do not fit each other or its result does not fit its inputs. Exit code 9."""

    exit_code = 9


class SmokeError(SparkpinError):
    """A server did not start or did not answer as it should. Exit code 10."""

    exit_code = 10


class DiskError(SparkpinError):
    """A disk is full or cannot be written. Exit code 11."""

    exit_code = 11


class DifferenceError(SparkpinError):
    """An image that was built again is not the image that was recorded, or published. Exit code 13."""

    exit_code = 13


class BusyError(SparkpinError):
    """Another run holds what this one needs: a lock, a port. Exit code 12."""

    exit_code = 12


class InspectionError(SparkpinError):
    """An image holds what would fail where it is to run, or what cannot be read. Exit code 14."""

    exit_code = 14


class DownError(SparkpinError):
    """A server that was started no longer answers. Exit code 16."""

    exit_code = 16


class QualityError(SparkpinError):
    """A release has lost more than its stage may cost. Exit code 15."""

    exit_code = 15


class CorruptionError(SparkpinError):
    """A server answers the same session differently, depending on caching, concurrency or drafts. Exit code 17."""

    exit_code = 17


class UntoldError(SparkpinError):
    """The result is inconclusive for this server or model. Exit code 18."""

    exit_code = 18
    label = "verdict"


class BumpError(SparkpinError):
    """Newer versions were tried, and the current release stays. Exit code 19."""

    exit_code = 19
