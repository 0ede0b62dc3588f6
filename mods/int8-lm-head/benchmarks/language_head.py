"""The INT8 head on the trained head of a language model that a package holds, over hidden states of its own.

    pip install torch h5py
    pip download --no-deps textgenrnn==2.0.0
    cd mods/int8-lm-head/benchmarks
    PYTHONPATH=..:../../modkit python language_head.py textgenrnn-2.0.0.tar.gz

textgenrnn is a recurrent model of 465 characters, trained on many thousands of posts: two LSTMs over the last 40
characters, a weighted mean of what they say, and a head of 465 x 356 with a bias. It writes texts here, which show
whether it was put together rightly, and each character that it chooses gives a hidden state. Runs on a CPU.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile

import h5py
import torch
from agreement import report

TEXTS, LENGTH, WINDOW, SIZE = 400, 40, 40, 128
TEMPERATURE = 0.5


def read(archive: str) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    with tarfile.open(archive) as file:

        def member(name: str) -> bytes:
            found = file.extractfile(f"textgenrnn-2.0.0/textgenrnn/{name}")
            assert found
            return found.read()

        weights: dict[str, torch.Tensor] = {}
        with h5py.File(io.BytesIO(member("textgenrnn_weights.hdf5"))) as stored:

            def keep(name: str, value: object) -> None:
                if isinstance(value, h5py.Dataset):
                    weights[name.removesuffix(":0")] = torch.tensor(value[()])

            stored.visititems(keep)
        return weights, json.loads(member("textgenrnn_vocab.json"))


def lstm(weights: dict[str, torch.Tensor], name: str) -> torch.nn.LSTM:
    """Stored as cuDNN has it: each gate's matrix in rows of outputs, whatever the shape says; two biases."""
    kernel, recurrent, bias = (weights[f"{name}/{name}/{part}"] for part in ("kernel", "recurrent_kernel", "bias"))
    inputs = kernel.shape[0]
    made = torch.nn.LSTM(inputs, SIZE, batch_first=True)
    rows = [torch.cat([gate.reshape(SIZE, -1) for gate in matrix.split(SIZE, dim=1)]) for matrix in (kernel, recurrent)]
    for parameter, value in zip(made.parameters(), (*rows, *bias.split(4 * SIZE)), strict=True):
        parameter.data = value.contiguous()
    return made


def main() -> None:
    weights, vocabulary = read(sys.argv[1])
    one, other = lstm(weights, "rnn_1"), lstm(weights, "rnn_2")
    embedding, attention = weights["embedding/embedding/embeddings"], weights["attention/attention/attention_W"]
    weight, bias = weights["output/output/kernel"].T.contiguous(), weights["output/output/bias"]
    generator = torch.Generator().manual_seed(0)
    text = torch.full((TEXTS, WINDOW + LENGTH), 0)
    text[:, WINDOW - 1] = vocabulary["<s>"]
    states = []
    with torch.no_grad():
        for end in range(WINDOW, WINDOW + LENGTH):
            embedded = embedding[text[:, end - WINDOW : end]]
            first, _ = one(embedded)
            second, _ = other(first)
            seen = torch.cat([embedded, first, second], dim=2)
            hidden = ((seen @ attention).softmax(1) * seen).sum(1)
            states.append(hidden)
            chances = ((hidden @ weight.T + bias) / TEMPERATURE).softmax(1)
            text[:, end] = torch.multinomial(chances, 1, generator=generator)[:, 0]
    names = {number: name for name, number in vocabulary.items()} | {0: ""}
    for line in text[:4, WINDOW:].tolist():
        print(repr("".join(names[number] for number in line)))
    report(torch.cat(states).bfloat16(), weight, bias)


if __name__ == "__main__":
    main()
