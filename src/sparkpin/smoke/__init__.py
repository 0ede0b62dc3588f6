"""The smoke test. What a stage asks for (`demands`) is known without a server; `run` starts one."""
