"""The INT8 head on a trained head with the hidden states that belong to it: a text recogniser's, which a package holds.

    pip install torch onnx onnxruntime pillow numpy
    pip download --no-deps rapidocr-onnxruntime==1.4.4
    PYTHONPATH=mods/int8-lm-head:mods/modkit python mods/int8-lm-head/benchmarks/text_recogniser.py WHEEL FONT.ttf

PP-OCRv4's recogniser ends as a language model does: hidden states of 120 numbers, a matrix for 6625 characters and a
bias. It reads lines of text that are drawn here; its hidden states and its head are taken out of the ONNX file. Runs on
a CPU, through naive.py: what the kernels are held to.
"""

from __future__ import annotations

import random
import sys
import zipfile

import numpy
import onnx
import onnxruntime
import torch
from agreement import report
from onnx import numpy_helper
from PIL import Image, ImageDraw, ImageFont

MODEL = "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx"
TEXT = "the quick brown fox jumps over a lazy dog while seven wizards box 2048 liquor jugs at 17:45 on 3 May"
LINES, HEIGHT, WIDTH = 200, 48, 640


def lines(font: ImageFont.FreeTypeFont) -> numpy.ndarray:
    """``[LINES, 3, HEIGHT, WIDTH]`` float32 in -1..1, as the recogniser wants it."""
    choose = random.Random(0)
    images = []
    for _ in range(LINES):
        image = Image.new("RGB", (WIDTH, HEIGHT), "white")
        ImageDraw.Draw(image).text((8, 8), " ".join(choose.choices(TEXT.split(), k=6)), fill="black", font=font)
        images.append(numpy.asarray(image, dtype=numpy.float32).transpose(2, 0, 1) / 127.5 - 1)
    return numpy.stack(images)


def head_of(model: onnx.ModelProto) -> tuple[str, torch.Tensor, torch.Tensor]:
    """Name of the hidden states, weight ``[V, K]``, bias ``[V]``: the last product and the sum behind it."""
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant":
            weights[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    product = [node for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in weights][-1]
    (added,) = (node for node in model.graph.node if product.output[0] in node.input)
    bias = next(weights[name] for name in added.input if name in weights)
    return product.input[0], torch.tensor(weights[product.input[1]]).T.contiguous(), torch.tensor(bias)


def main() -> None:
    model = onnx.load_model_from_string(zipfile.ZipFile(sys.argv[1]).read(MODEL))
    hidden_name, weight, bias = head_of(model)
    model.graph.output.append(onnx.helper.make_tensor_value_info(hidden_name, onnx.TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    drawn = lines(ImageFont.truetype(sys.argv[2], 26))
    name = session.get_inputs()[0].name
    parts = [session.run([hidden_name], {name: drawn[start : start + 10]})[0] for start in range(0, LINES, 10)]
    x = torch.tensor(numpy.concatenate(parts)).flatten(0, 1).bfloat16()
    report(x, weight, bias)


if __name__ == "__main__":
    main()
