"""What a server's last words mean, and what mends it. Pure data: the first that fits counts."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """pattern: searched in the log from the last answer on; mend: `{recipe}` and `{tag}` are filled in.

    is_last: counts only where no error says more.
    """

    pattern: str
    what: str
    mend: str
    is_last: bool = False


OTHER_NODE = "the log of that node says why; Docker starts both again, and they wait for each other"
CAUSES = (
    Cause(
        r"sparkpin: ended: the kernel killed .* for want of memory",
        "it passed its memory limit, and the kernel ended a process of it",
        "invoke plan --recipe {recipe} says what it needs; lower --max-model-len, --max-num-batched-tokens or the "
        "cache's size in the recipe",
    ),
    Cause(
        r"sparkpin: ended: it answered no request",
        "it hung: requests got no answer and its counters stood still, so it was ended to be started again",
        "when it comes back: invoke logs --recipe {recipe}, and dmesg for an error of the GPU (Xid)",
    ),
    Cause(
        r"sparkpin: REFUSED: ",
        "its nodes do not serve the same release, or one has no whole checkpoint; the log names both sides",
        "invoke export {tag} URL --with-checkpoint brings a machine both",
    ),
    Cause(
        r"CUDA out of memory|torch\.(?:cuda\.)?OutOfMemoryError|NVRM: .*out of memory|NV_ERR_NO_MEMORY",
        "the GPU's memory, which on a Spark is the machine's, did not suffice",
        "invoke plan --recipe {recipe}; lower --gpu-memory-utilization or --max-num-batched-tokens, and end what else "
        "takes memory",
    ),
    Cause(
        r"Free memory on device .* is less than desired GPU memory utilization",
        "less is free than --gpu-memory-utilization asks for: other programs or the page cache have it",
        "sudo sh -c 'echo 1 > /proc/sys/vm/drop_caches', end what else takes memory, or lower "
        "--gpu-memory-utilization (invoke plan says to what)",
    ),
    Cause(
        r"(?:larger|more) than the available KV cache memory|available KV cache memory .*max_model_len|"
        r"No available memory for the cache blocks|KV cache is needed, which is larger",
        "the KV cache does not hold one request of --max-model-len",
        "invoke plan --recipe {recipe} says which length fits",
    ),
    Cause(
        r"Insufficient space in /dev/shm|Bus error|unable to (?:mmap|allocate shared memory)",
        "its processes share more memory than /dev/shm has",
        "run it in one process (VLLM_ENABLE_V1_MULTIPROCESSING: 0 in the stack's env), or lower --max-num-seqs",
    ),
    Cause(
        r"unrecognized arguments|invalid choice: |expected one argument|error: argument ",
        "this vLLM does not know a flag of the recipe, or not that value",
        "correct the command of recipes/{recipe}.yaml (the error names the flag), then invoke build and invoke smoke",
    ),
    Cause(
        r"driver on your system is too old|CUDA driver version is insufficient|unsupported display driver|"
        r"forward compatibility was attempted",
        "the NVIDIA driver is older than the image's CUDA",
        "invoke doctor says which driver the stack wants",
    ),
    Cause(
        r"no kernel image is available|no compatible kernel|sm_\d+ is not compatible",
        "the image has no code for this GPU",
        "invoke inspect {tag}",
    ),
    Cause(
        r"undefined symbol|cannot open shared object file|Torch not compiled with CUDA",
        "libraries of the image do not fit together",
        "invoke inspect {tag} names them; invoke rollback --serve goes back meanwhile",
    ),
    Cause(
        r"ptxas (?:fatal|error)|nvcc fatal|cuda/std/.*No such file|ninja: build stopped|Failed to find C compiler",
        "a kernel could not be compiled at run time",
        "invoke inspect {tag} looks for the compiler's parts in the image",
    ),
    Cause(
        r"(?:KeyError|AttributeError|ValueError).*rope_(?:scaling|parameters|theta|type)|rope_parameters",
        "vLLM and the checkpoint's config write the position encoding differently",
        "some versions want the AutoRound rope fix and later ones fail with it: see the mods of the recipe's stage",
    ),
    Cause(
        r"TokenizersBackend|Tokenizer class .* does not exist",
        "the checkpoint's tokenizer is newer than the image's transformers",
        "pin a newer transformers in the stack, or a revision of the model from before",
    ),
    Cause(
        r"[Cc]hat template|jinja2\.exceptions|As of transformers v4\.44",
        "the chat template is missing or wrong",
        "give the recipe's command a --chat-template that is in the image",
    ),
    Cause(
        r"trust_remote_code=True|requires you to execute the configuration file",
        "the model wants code of its own to be run, which no lock of ours has seen",
        "use a vLLM that knows the model by itself",
    ),
    Cause(
        r"SignatureChanged|sparkpin_modkit|refuses? vllm",
        "a mod does not know this vLLM and refuses to change it",
        "invoke why {tag} PATH says where the mod is from; leave it out of the stage, or mend it",
    ),
    Cause(
        r"No such file or directory: '/model|/model.*does not appear to have|SafetensorError|HeaderTooLarge",
        "the checkpoint is not whole",
        "invoke checkpoint --verify --recipe {recipe}",
    ),
    Cause(
        r"No space left on device|Disk quota exceeded",
        "a disk or /tmp of the container (2 GiB) is full",
        "invoke prune --keep 2 frees the disk; invoke doctor says which is full",
    ),
    Cause(
        r"[Aa]ddress already in use",
        "its port is taken",
        "invoke serve --port N chooses another",
    ),
    Cause(
        r"Permission denied: '/model|Permission denied.*/model",
        "the container's user may not read the checkpoint",
        "chmod -R a+rX the checkpoint's folder",
    ),
    Cause(
        r"NVRM: Xid|CUDA error: (?:an illegal memory|unspecified launch|device-side assert)|Cutlass error",
        "a kernel failed on the GPU",
        "invoke rollback --serve goes back to the last good release; dmesg has more where it says Xid",
    ),
    Cause(
        r"gloo/transport/tcp/.*(?:Connection (?:reset|closed) by peer|Broken pipe)|NCCL error: remote process exited",
        "another node, or the link to it, went away in the middle of a step, and this one ended of it",
        OTHER_NODE,
    ),
    Cause(
        r"sparkpin: rank \d+ (?:closed the connection|was silent)",
        "another node of it ended or went silent, and this one ended with it",
        OTHER_NODE,
        is_last=True,
    ),
    Cause(
        r"EngineDeadError|EngineCore .*died|Engine core .*died|sparkpin: ended by signal 9|EngineCore.*exit",
        "a process of the server was killed from outside, or crashed without a word",
        "dmesg says whether the kernel did it; Docker starts it again, up to the limit",
        is_last=True,
    ),
)


def cause_of(text: str, *, has_error: bool) -> Cause | None:
    """has_error: whether an error is known that is more than a consequence."""
    found = (cause for cause in CAUSES if re.search(cause.pattern, text))
    return next((cause for cause in found if not (cause.is_last and has_error)), None)
