"""Engines of other machines: unix://, tcp:// (as DOCKER_HOST) and ssh://.

Over ssh each connection to the engine is an `ssh HOST docker system dial-stdio`, as the Docker CLI makes it, behind a
local socket: keys, agents, jump hosts and known hosts stay ssh's business. The SDK's own way needs paramiko and keeps
to itself why ssh failed.

A link is another way to the same host: ssh goes to the host's address there, with the host's own keys (`way_to`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import os
import shutil
import socket
import socketserver
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import docker
from docker.transport import UnixHTTPAdapter

from sparkpin.core.errors import DiskError, EngineError, HostError, InputError, NetworkError
from sparkpin.host.engine import TIMEOUT, Engine, engine_errors

OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15")
SECONDS = 30  # that a host may take to answer
# All connections go through the first, so that a key that wants to be touched is touched once. What a killed run leaves
# ends by itself.
SHARED = ("-o", "ControlMaster=auto", "-o", "ControlPersist=60", "-o")
DIAL = ("docker", "system", "dial-stdio")
POOLS = 5  # the SDK keeps a connection for each path that it asked; beyond 10 (MaxSessions) each is a login of its own
SHAPES = "ssh://user@host[:port], unix:///path/of/docker.sock or tcp://host:port"
MACHINE_ID = Path("/etc/machine-id")
AGAIN = "the same command with --to"
ADDRESS_OF, MASK_OF = 0x8915, 0x891B  # SIOCGIFADDR, SIOCGIFNETMASK


@contextlib.contextmanager
def engine_at(url: str, way: str = "", seconds: int = SECONDS) -> Iterator[Engine]:
    """The engine at a url, for as long as the block runs. way: the address that ssh goes to instead of the host's own;
    seconds: that an ssh host may take to answer.

    Raises InputError for no such url, NetworkError when ssh does not get there, EngineError when no engine answers.
    """
    scheme, host, port = place_of(url)
    if scheme not in ("ssh", "unix", "tcp"):
        raise InputError(f"saw {url!r}, wanted {SHAPES}", next_step=f"{AGAIN} ssh://user@host")
    if scheme == "tcp" and not (host and port):
        step = f"{AGAIN} tcp://{host or 'host'}:2375, or whatever port that engine listens on"
        raise InputError(f"saw {url!r}, wanted tcp://host:port", next_step=step)
    with bridge(url, way, seconds) if scheme == "ssh" else contextlib.nullcontext(url) as local:
        with errors_of(url):
            engine = connect(local)
        with contextlib.closing(engine.client):
            yield engine


@contextlib.contextmanager
def errors_of(url: str) -> Iterator[None]:
    """Errors of the engine at a url say so: two engines take part in a copy."""
    try:
        yield
    except EngineError as error:
        said = error.message.replace("at the default socket", "there")
        own = "" if "invoke doctor" in error.next_step else error.next_step  # that looks at this machine
        raise EngineError(f"{url}: {said}", next_step=own or f"docker -H {url} info") from None
    except DiskError as error:
        raise DiskError(f"{url}: {error.message}", next_step=f"free space there; docker -H {url} system df") from None


def owner(home: str) -> str:
    """Whose containers those on another machine are: two machines may have homes of one name, and clones a host's."""
    try:
        machine = hashlib.sha256(b"sparkpin " + MACHINE_ID.read_bytes()).hexdigest()[:12]  # machine-id(5): not as it is
    except OSError:
        machine = ""
    return f"{socket.gethostname()}:{machine}:{home}"


def connect(url: str) -> Engine:
    environment = {**os.environ, "DOCKER_HOST": url}
    with engine_errors():
        client = docker.DockerClient.from_env(timeout=TIMEOUT, environment=environment)
        if url.startswith("unix://"):
            place = url.replace("unix://", "http+unix://")
            client.api.mount("http+docker://", UnixHTTPAdapter(place, TIMEOUT, pool_connections=POOLS))
        client.ping()
    return Engine(client)


def place_of(url: str) -> tuple[str, str, int | None]:
    """(scheme, host, port). InputError for a port that is none."""
    try:
        parts = urlsplit(url)
        return parts.scheme, host_of(parts.netloc), parts.port
    except ValueError as error:
        raise InputError(f"{url}: {error}", next_step=f"{AGAIN} {SHAPES}") from None


def ssh_command(url: str, *options: str) -> list[str]:
    _, host, port = place_of(url)
    parts = urlsplit(url)
    if not host or parts.path not in ("", "/") or parts.password or parts.query or parts.fragment:
        login = f"{parts.username}@" if parts.username else ""
        number = f":{port}" if port else ""
        step = f"{AGAIN} ssh://{login}{host or 'HOST'}{number} (keys and jump hosts belong into ~/.ssh/config)"
        raise InputError(f"saw {url!r}, wanted ssh://user@host[:port]", next_step=step)
    program = shutil.which("ssh")
    if program is None:
        raise HostError("there is no ssh on this machine", next_step="apt-get install openssh-client (as root)")
    user = ["-l", parts.username] if parts.username else []
    return [program, *OPTIONS, *options, *user, *(["-p", str(port)] if port else []), "--", host]


def host_of(netloc: str) -> str:
    """As it is written: names in ~/.ssh/config have upper case, too, which `hostname` of urllib takes from them."""
    place = netloc.rpartition("@")[2]
    return place[1:].partition("]")[0] if place.startswith("[") else place.partition(":")[0]


def way_to(url: str, link: str) -> str:
    """The IP address at which a link reaches the host of a url. link: that address, or this machine's interface on it:
    then the host is asked, by the url's own way, which addresses it has.

    InputError for a link that is none, and for one that does not lead to one address there.
    """
    if place_of(url)[0] != "ssh":
        raise InputError(f"--link {link}: goes with ssh://, saw {url}", next_step="the same command without --link")
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(link))
    if link not in (names := [name for _, name in socket.if_nameindex()]):
        raise InputError(
            f"--link {link}: is neither an IP address nor an interface of this machine ({', '.join(names)})",
            next_step="the same command with the host's address on the link",
        )
    try:
        network = network_of(link)
    except OSError as error:
        raise InputError(
            f"--link {link}: it has no IPv4 address here ({error.strerror})",
            next_step=f"give it one (ip address add ADDRESS/24 dev {link}), or name the host's address on the link",
        ) from None
    there = [ip for ip in addresses_of(url) if ip in network.network and ip != network.ip]
    if len(there) != 1:
        seen = ", ".join(map(str, there)) or "none"
        raise InputError(
            f"--link {link}: addresses of {url} in its network {network.network}: saw {seen}, wanted one",
            next_step="the same command with the host's address on the link",
        )
    return str(there[0])


def network_of(interface: str) -> ipaddress.IPv4Interface:
    """This machine's first IPv4 address on an interface, with its network."""
    request = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        ip, mask = (socket.inet_ntoa(fcntl.ioctl(asked, what, request)[20:24]) for what in (ADDRESS_OF, MASK_OF))
    return ipaddress.IPv4Interface(f"{ip}/{mask}")


def addresses_of(url: str) -> list[ipaddress.IPv4Address]:
    """IPv4 addresses of an ssh host, as it says itself."""
    asked = [*ssh_command(url, "-o", f"ConnectTimeout={SECONDS}"), "hostname", "-I"]
    done = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode == 255:
        raise no_way(url, " ".join(done.stderr.split()))
    found = []
    for word in done.stdout.split():
        with contextlib.suppress(ValueError):
            found.append(ipaddress.IPv4Address(word))
    return found


def options_of(url: str, way: str) -> list[str]:
    """Options that lead ssh to an address and have it hold the host's key against the same line of known_hosts."""
    if not way:
        return []
    asked = [ssh_command(url)[0], "-G", *ssh_command(url)[1:]]
    said = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
    resolved = dict(line.split(" ", 1) for line in said.splitlines() if " " in line)
    host, port = resolved.get("hostname", place_of(url)[1]), resolved.get("port", "22")
    alias = resolved.get("hostkeyalias") or (host if port == "22" else f"[{host}]:{port}")
    return ["-o", f"HostName={way}", "-o", f"HostKeyAlias={alias}", "-o", "ProxyCommand=none"]


@contextlib.contextmanager
def bridge(url: str, way: str = "", seconds: int = SECONDS) -> Iterator[str]:
    """A local socket (its url) behind which the engine of an ssh host answers."""
    with tempfile.TemporaryDirectory(prefix="sparkpin-ssh-") as folder, contextlib.ExitStack() as stack:
        limit = ("-o", f"ConnectTimeout={seconds}")
        shared = (*SHARED, f"ControlPath={folder}/ssh", *limit, *options_of(url, way))
        command = ssh_command(url, *shared)
        require_docker(url, command, way, seconds)
        stack.callback(subprocess.run, ssh_command(url, *shared, "-O", "exit"), stderr=subprocess.DEVNULL)
        local = Path(folder) / "docker.sock"
        running: list[subprocess.Popen[bytes]] = []

        class SocketHandler(socketserver.BaseRequestHandler):
            """ssh gets the connection itself as its input and output."""

            def handle(self) -> None:
                process = subprocess.Popen(
                    [*command, *DIAL],
                    stdin=self.request,
                    stdout=self.request,
                    stderr=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C is for us: what is removed then still goes this way
                )
                running.append(process)
                process.wait()

        class SocketServer(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True
            block_on_close = False

        with SocketServer(str(local), SocketHandler) as server:
            threading.Thread(target=server.serve_forever, args=(0.05,), name="ssh", daemon=True).start()
            try:
                yield f"unix://{local}"
            finally:
                server.shutdown()
                for process in running:
                    process.terminate()


def require_docker(url: str, command: list[str], way: str = "", seconds: int = SECONDS) -> None:
    """One try whose failure can be read: whether ssh gets there, and whether docker there reaches an engine."""
    argv = [*command, "docker", "version", "--format", "{{.Server.Version}}"]
    with tempfile.TemporaryFile() as errors:  # no pipe: the shared connection holds on to it
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, timeout=4 * seconds
            )
        except subprocess.TimeoutExpired:
            raise NetworkError(
                f"{url}: no answer within {4 * seconds} s", next_step=f"ssh {url} docker info: does it answer?"
            ) from None
        errors.seek(0)
        words = errors.read().decode(errors="replace").split()
    if not done.returncode:
        return
    said = " ".join(words) or f"it ended with exit code {done.returncode}"
    if done.returncode == 255:
        raise no_way(url, said, way)
    if done.returncode == 127:
        raise EngineError(f"{url}: there is no docker: {said}", next_step="install Docker there (./install.sh)")
    raise EngineError(
        f"{url}: its Docker engine does not answer: {said}",
        next_step=f"ssh {url} docker info; the user there may have to be in the group docker",
    )


def no_way(url: str, said: str, way: str = "") -> NetworkError:
    over = f" at {way}, its address on the link" if way else ""
    step = f"ping {way}, and look whether ssh listens on that address there, or leave --link out" if way else ""
    target = url.removeprefix("ssh://").rstrip("/")
    return NetworkError(f"ssh does not get to {target}{over}: {said}", next_step=step or way_in(url, said))


def way_in(url: str, said: str) -> str:
    """What to do about ssh's reason not to get there."""
    _, host, port = place_of(url)
    if "resolve hostname" in said:
        return f"correct the name {host}, or give it an address (DNS, /etc/hosts, HostName in ~/.ssh/config)"
    if "Host key verification failed" in said:
        return f"`ssh {url}` once by hand, to look at its key and take it"
    if "Permission denied" in said:
        return f"`ssh {url}` has to work without a password (ssh-keygen, ssh-copy-id)"
    return f"look whether {host} is on and ssh listens there at port {port or 22}; `ssh {url}` has to work"
