"""One model over several machines: the words and variables that vLLM's own multi-node executor needs.

A release knows how many nodes it is for (`--nnodes`, in its command and so in its key), and no address. What differs
from node to node is added where a container is made: `words_at` and `env_at`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sparkpin.core.errors import ManifestError
from sparkpin.pins.vllm_flags import drop_flags, flag_value, parse_flags, set_flag

NODES, EXECUTOR = "--nnodes", "--distributed-executor-backend"
TENSOR, PIPELINE = "--tensor-parallel-size", "--pipeline-parallel-size"
STORE_PORT = 29501  # of torch's store, on rank 0
STORE = "SPARKPIN_STORE"  # the variable with its address and port
MOST_NODES = 8
PER_NODE = ("--node-rank", "--master-addr", "--master-port", "--headless")
IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"  # 0 fits one process alone


@dataclass(frozen=True)
class NodeRank:
    """A container's place among those that serve one model.

    rank: 0 has the API and torch's store; address, head: IP addresses of this node and of rank 0 on the link between
    them; interface: of `address`.
    """

    rank: int
    address: str
    head: str
    interface: str

    @property
    def on_one_host(self) -> bool:
        """Containers that share one network namespace without a network: in tests, and for two GPUs of one machine."""
        return self.interface == "lo"


def on_loopback(rank: int) -> NodeRank:
    return NodeRank(rank, "127.0.0.1", "127.0.0.1", "lo")


def nodes_of(argv: Sequence[str]) -> int:
    """How many machines a command is for. 1 where it names no number, which `word_faults` refuses."""
    words = flag_value(argv, NODES) or ""
    return int(words) if words.isdecimal() else 1


def example(count: int) -> str:
    """A value of `--nodes`."""
    return ",".join(["here", *(f"ssh://user@host{rank}" for rank in range(1, count))])


def spread(argv: Sequence[str], env: Mapping[str, str], nodes: int, *, gpu: bool) -> tuple[list[str], dict[str, str]]:
    """A command and its environment for several machines with one process each. The same for one.

    The tensor-parallel size is the recipe's own, else the number of nodes. What is set comes last, so that a command
    without it, as other tools want it, comes to the same words again.
    """
    if nodes == 1:
        return list(argv), dict(env)
    words = drop_flags(argv, EXECUTOR, NODES)
    if flag_value(words, TENSOR) is None and flag_value(words, PIPELINE) is None:
        words = set_flag(words, TENSOR, nodes)
    words += [EXECUTOR, "mp", NODES, str(nodes)]
    variables = {name: value for name, value in env.items() if name != IN_PROCESS}
    if not gpu:
        variables.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else nodes on one host take the same cores
    return words, variables


def word_faults(argv: Sequence[str], nodes: int, file: object) -> Iterator[ManifestError]:
    """What is wrong with a command for `nodes` machines, whatever the model; file: the recipe's."""
    names = {flag.key for flag in parse_flags(argv)[1] if not flag.is_negated}
    for name in sorted(names & set(PER_NODE)):
        expected = "a command without it: `invoke serve --nodes` names the machines, and each gets its own"
        yield ManifestError(file, "command", name, expected)
    if (named := flag_value(argv, NODES)) not in (None, str(nodes)):
        yield ManifestError(file, "command", f"{NODES} {named}", f"the key `nodes: {named}`, and no {NODES}")
    if nodes == 1:
        return
    tensor, pipeline = (flag_value(argv, name) or "1" for name in (TENSOR, PIPELINE))
    if not (tensor.isdecimal() and pipeline.isdecimal() and int(tensor) * int(pipeline) == nodes):
        got = f"{TENSOR} {tensor}, {PIPELINE} {pipeline} for {nodes} nodes"
        yield ManifestError(file, "command", got, f"two numbers whose product is {nodes}: a node has one process")
    if copies := sorted(name for name in names if name.startswith("--data-parallel-")):
        expected = "no data parallelism: two releases, one on each machine, answer twice as many requests"
        yield ManifestError(file, "command", " ".join(copies), expected)


def words_at(argv: Sequence[str], place: NodeRank) -> list[str]:
    """The command of one node. Ranks above 0 have no API: neither address nor socket."""
    words = set_flag(argv, "--node-rank", place.rank)
    words = set_flag(set_flag(words, "--master-addr", place.head), "--master-port", STORE_PORT)
    if place.on_one_host:  # vLLM 0.33 takes the GPUs of all nodes for its own host's and ends with an IndexError
        words = set_flag(words, "--disable-custom-all-reduce", None)
    if place.rank:
        words = set_flag(drop_flags(words, "--host", "--port", "--uds"), "--headless", None)
    return words


def env_at(place: NodeRank) -> dict[str, str]:
    """Without VLLM_HOST_IP vLLM asks for the default route, which a link of its own has not. STORE is read by modkit:
    torch's store listens on every address else."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
    store = {} if place.rank else {STORE: f"{place.address}:{STORE_PORT}"}
    return {"VLLM_HOST_IP": place.address} | store | dict.fromkeys(names, place.interface)
