"""llama.cpp's own server of a GGUF file, until it is killed; prints its URL. In an environment that has xllamacpp."""

from __future__ import annotations

import sys
import time

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.hostnames, params.port, params.ui = sys.argv[1], ["127.0.0.1"], 0, False
params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 16384, 4, 1
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
time.sleep(3600)
