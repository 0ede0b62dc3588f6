"""Engines of other machines: unix://, tcp:// (as DOCKER_HOST) and ssh://.

Over ssh the engine's socket there is forwarded to a socket here: keys, agents, jump hosts and known hosts stay ssh's
business. The SDK's own way needs paramiko and keeps to itself why ssh failed.

A link is another way to the same host: ssh goes to the host's address there, with the host's own keys (`way_to`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from sparkpin.core.errors import DiskError, EngineError, HostError, InputError, NetworkError
from sparkpin.host.daemon import environment
from sparkpin.host.engine import Engine

OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15")
SECONDS = 30  # that a host may take to answer
# Whether an engine answers there, where its socket is (DOCKER_HOST, a context), and then for as long as this end of the
# connection lives: what a killed run leaves ends by itself.
THERE = """docker version --format '{{.Server.Version}}' >&2 &&
docker context inspect --format '{{.Endpoints.docker.Host}}' && exec cat"""
SHAPES = "ssh://user@host[:port], unix:///path/of/docker.sock or tcp://host:port"
MACHINE_ID = Path("/etc/machine-id")
ADDRESS_OF, MASK_OF = 0x8915, 0x891B  # SIOCGIFADDR, SIOCGIFNETMASK


@contextlib.contextmanager
def engine_at(url: str, way: str = "", seconds: int = SECONDS) -> Iterator[Engine]:
    """The engine at a url, for as long as the block runs. way: the address that ssh goes to instead of the host's own;
    seconds: that an ssh host may take to answer.

    Raises InputError for no such url, NetworkError when ssh does not get there, EngineError when no engine answers.
    """
    is_ssh = address_of(url).scheme == "ssh"
    with forwarded(url, way, seconds) if is_ssh else contextlib.nullcontext(url) as local:
        with errors_of(url):
            engine = Engine.connect(environment() | {"DOCKER_HOST": local})
        with contextlib.closing(engine.client):
            yield engine


@contextlib.contextmanager
def errors_of(url: str) -> Iterator[None]:
    """Errors of the engine at a url say so: two engines take part in a copy."""
    try:
        yield
    except EngineError as error:
        step = "" if "invoke doctor" in error.next_step else error.next_step  # that looks at this machine
        raise EngineError(f"{url}: {error.message}", next_step=step or f"docker -H {url} info") from None
    except DiskError as error:
        raise DiskError(f"{url}: {error.message}", next_step=f"free space there; docker -H {url} system df") from None


def owner(home: str) -> str:
    """Whose containers those on another machine are: two machines may have homes of one name, and clones a host's."""
    try:
        machine = hashlib.sha256(b"sparkpin " + MACHINE_ID.read_bytes()).hexdigest()[:12]  # machine-id(5): not as it is
    except OSError:
        machine = ""
    return f"{socket.gethostname()}:{machine}:{home}"


@dataclass(frozen=True)
class Address:
    """host: as it is written, since names in ~/.ssh/config may have upper case, which urllib takes from them."""

    scheme: str
    user: str
    host: str
    port: int | None


def address_of(url: str) -> Address:
    """InputError for a url that leads to no engine."""
    with contextlib.suppress(ValueError):  # a port that is none
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        host = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        is_plain = parts.path in ("", "/") and not (parts.password or parts.query or parts.fragment)
        fits = {"ssh": host and is_plain, "tcp": host and parts.port, "unix": parts.path}
        if fits.get(parts.scheme):
            return Address(parts.scheme, parts.username or "", host, parts.port)
    raise InputError(
        f"got {url.rpartition('@')[2]!r}, expected {SHAPES}",
        next_step="the same command with such a URL (keys, passwords and jump hosts belong into ~/.ssh/config)",
    )


def ssh_command(url: str, *options: str) -> list[str]:
    to = address_of(url)
    program = shutil.which("ssh")
    if program is None:
        raise HostError("there is no ssh on this machine", next_step="apt-get install openssh-client (as root)")
    user = ["-l", to.user] if to.user else []
    return [program, *OPTIONS, *options, *user, *(["-p", str(to.port)] if to.port else []), "--", to.host]


def run_ssh(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")


def way_to(url: str, link: str) -> str:
    """The IP address at which a link reaches the host of a url. link: that address, or this machine's interface on it:
    then the host is asked, by the url's own way, which addresses it has.

    InputError for a link that is none, and for one that does not lead to one address there.
    """
    if address_of(url).scheme != "ssh":
        raise InputError(f"--link {link}: goes with ssh://, got {url}", next_step="the same command without --link")
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(link))
    if link not in (names := [name for _, name in socket.if_nameindex()]):
        raise InputError(
            f"--link {link}: is neither an IP address nor an interface of this machine ({', '.join(names)})",
            next_step="the same command with the host's address on the link",
        )
    try:
        face = network_of(link)
    except OSError as error:
        raise InputError(
            f"--link {link}: it has no IPv4 address here ({error.strerror})",
            next_step=f"give it one (ip address add ADDRESS/24 dev {link}), or name the host's address on the link",
        ) from None
    there = [ip for ip in addresses_of(url) if ip in face.network and ip != face.ip]
    if len(there) != 1:
        raise InputError(
            f"--link {link}: addresses of {url} in its network {face.network}: "
            f"got {', '.join(map(str, there)) or 'none'}, expected one",
            next_step="the same command with the host's address on the link",
        )
    return str(there[0])


def network_of(interface: str) -> ipaddress.IPv4Interface:
    """This machine's first IPv4 address on an interface, with its network."""
    request = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as face:
        ip, mask = (socket.inet_ntoa(fcntl.ioctl(face, what, request)[20:24]) for what in (ADDRESS_OF, MASK_OF))
    return ipaddress.IPv4Interface(f"{ip}/{mask}")


def addresses_of(url: str) -> list[ipaddress.IPv4Address]:
    """IPv4 addresses of an ssh host, by its own word."""
    done = run_ssh([*ssh_command(url, "-o", f"ConnectTimeout={SECONDS}"), "hostname", "-I"])
    if done.returncode == 255:
        raise no_way(url, done.stderr)
    found = []
    for word in done.stdout.split():
        with contextlib.suppress(ValueError):
            found.append(ipaddress.IPv4Address(word))
    return found


def options_of(url: str, way: str) -> list[str]:
    """Options that lead ssh to an address and have it compare the host's key with the same line of known_hosts."""
    if not way:
        return []
    command = ssh_command(url)
    resolved = dict(
        line.split(" ", 1) for line in run_ssh([command[0], "-G", *command[1:]]).stdout.splitlines() if " " in line
    )
    host, port = resolved.get("hostname", address_of(url).host), resolved.get("port", "22")
    alias = resolved.get("hostkeyalias") or (host if port == "22" else f"[{host}]:{port}")
    return ["-o", f"HostName={way}", "-o", f"HostKeyAlias={alias}", "-o", "ProxyCommand=none"]


@contextlib.contextmanager
def forwarded(url: str, way: str = "", seconds: int = SECONDS) -> Iterator[str]:
    """A local socket (its url) behind which the engine of an ssh host answers. One login, so that a key that asks to be
    touched is touched once."""
    with tempfile.TemporaryDirectory(prefix="sparkpin-ssh-") as folder, tempfile.TemporaryFile() as errors:
        local, options = f"{folder}/docker.sock", ("-o", f"ControlPath={folder}/ssh")
        first = ("-o", "ControlMaster=yes", "-o", f"ConnectTimeout={seconds}", *options_of(url, way))
        process = subprocess.Popen(
            [*ssh_command(url, *options, *first), THERE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            process_group=0,  # Ctrl-C is for us: what is removed then still goes this way
        )
        late = threading.Timer(4 * seconds, process.kill)
        late.start()
        try:
            assert process.stdin and process.stdout
            there = process.stdout.readline().strip()
            if not there:
                code = process.wait()
                errors.seek(0)
                raise failure(url, code, errors.read().decode(errors="replace"), way, 4 * seconds)
            late.cancel()
            done = run_ssh(
                ssh_command(url, *options, "-O", "forward", "-L", f"{local}:{there.removeprefix('unix://')}")
            )
            if done.returncode:
                raise EngineError(f"{url}: its engine at {there} cannot be forwarded: {done.stderr.strip()}")
            yield f"unix://{local}"
        finally:
            late.cancel()
            process.terminate()
            process.communicate()


def failure(url: str, code: int, text: str, way: str, seconds: int) -> NetworkError | EngineError:
    """Why ssh, or docker there, ended with this exit code."""
    cause = " ".join(text.split()) or f"it ended with exit code {code}"
    if code < 0:
        return NetworkError(f"{url}: no answer within {seconds} s", next_step=f"ssh {url} docker info: does it answer?")
    if code == 255:
        return no_way(url, cause, way)
    if code == 127:
        return EngineError(f"{url}: there is no docker: {cause}", next_step="install Docker there (./install.sh)")
    return EngineError(
        f"{url}: its Docker engine does not answer: {cause}",
        next_step=f"ssh {url} docker info; the user there may have to be in the group docker",
    )


def no_way(url: str, text: str, way: str = "") -> NetworkError:
    """ssh's own reason not to get there, with what to do about it."""
    to = address_of(url)
    over, cause = f" at {way}, its address on the link" if way else "", " ".join(text.split())
    if way:
        step = f"ping {way}, and look whether ssh listens on that address there, or leave --link out"
    elif "resolve hostname" in cause:
        step = f"correct the name {to.host}, or give it an address (DNS, /etc/hosts, HostName in ~/.ssh/config)"
    elif "Host key verification failed" in cause:
        step = f"`ssh {url}` once by hand, to look at its key and accept it"
    elif "Permission denied" in cause:
        step = f"`ssh {url}` has to work without a password (ssh-keygen, ssh-copy-id)"
    else:
        step = f"look whether {to.host} is on and ssh listens there at port {to.port or 22}; `ssh {url}` has to work"
    target = url.removeprefix("ssh://").rstrip("/")
    return NetworkError(f"ssh does not get to {target}{over}: {cause}", next_step=step)
