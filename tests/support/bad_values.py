"""Values that no command, environment or record may hold: what a build refuses, and an import."""

from __future__ import annotations

WORDS = {  # what is wrong -> a word of a command line
    "a line end": "a\nb",
    "ESC": "\x1b[2J",
    "a token of the hub": "hf_" + "a" * 34,
    "a key of OpenAI's form": "sk-" + "a" * 40,
    "a password in a URL": "https://me:secret@host/x",
}
FLAGS = {"--api-key": "0123456789abcdef", "--api_key=0123456789abcdef": None, "--hf-token": "tok"}
FLAGS |= {"--api-k": "tok", "--hf_t=tok": None}  # argparse takes the beginning of a flag
ENV = {
    "": "x",
    "1X": "x",
    "A\n": "x",
    "Ä": "x",
    "VLLM_API_KEY": "0123456789abcdef",
    "HF_TOKEN": "tok",
    "AWS_SECRET_ACCESS_KEY": "x" * 40,
    "MY_PASSWORD": "x",
    "X": "a\nb",
    "Z": "-----BEGIN RSA PRIVATE KEY-----",
}
SECRETS = ("0123456789abcdef", "hf_a", "sk-a", "me:secret", "x" * 40)  # what no message repeats
FINE_WORDS = ("--x", '{"a": [1, 2]}', "{% for m in messages %}", "Ä b", "--max-num-batched-tokens", "10", "--hf-token")
FINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "VLLM_API_KEY": "",
    "HF_TOKEN": "${HF_TOKEN}",
    "HF_TOKEN_PATH": "/x/token",
    "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE": "163840",
    "TOKENIZERS_PARALLELISM": "false",
    "GPG_KEY": "A035C8C19219BA821ECEA86B64E628F8D684696D",
    "http_proxy": "http://proxy:3128",
    "_x1": "a  b",
}
HUGE = 2**80
