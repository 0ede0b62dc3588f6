"""Keeps a process from reaching anything but Unix sockets: the front listens, and then needs no network of its own.

A seccomp filter (seccomp(2), Documentation/userspace-api/seccomp_filter.rst), set by the process itself, for itself and
what it starts. It cannot be taken away again. A filter sees numbers and no addresses. So `connect`, which can turn a
client's connection into one to elsewhere, may only have an address that is too short for IP; `SOCKETS` is so short.
The front's container has this file, too: standard library alone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct

SOCKETS = "/run/v"  # with a folder and a socket of one letter each, 13 bytes as an address
SYSTEMS = {  # AUDIT_ARCH_*, numbers of socket(2) and connect(2)
    "x86_64": (0xC000003E, 41, 42),
    "aarch64": (0xC00000B7, 198, 203),
}
IO_URING_SETUP = 425  # which makes sockets without a call
X32 = 0x40000000  # from here on: calls of another ABI with numbers of its own
ALLOW, DENY = 0x7FFF0000, 0x00050000 | errno.EACCES
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K
NUMBER, SYSTEM, FIRST, THIRD = 0, 4, 16, 32  # offsets in struct seccomp_data: of the call, and of its arguments
IPV4 = 16  # bytes of struct sockaddr_in; IPv6 has more
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, MODE_FILTER = 38, 22, 2


class Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def program(machine: str) -> bytes:
    """struct sock_filter, each: code, steps to skip if true and if not, value."""
    system, socket_call, connect_call = SYSTEMS[machine]
    steps = (
        (LOAD, 0, 0, SYSTEM),
        (EQUAL, 0, 10, system),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 8, 0, X32),
        (EQUAL, 7, 0, IO_URING_SETUP),
        (EQUAL, 1, 0, connect_call),
        (EQUAL, 2, 4, socket_call),
        (LOAD, 0, 0, THIRD),
        (AT_LEAST, 3, 2, IPV4),
        (LOAD, 0, 0, FIRST),
        (EQUAL, 0, 1, socket.AF_UNIX),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, DENY),
    )
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def no_more_sockets() -> None:
    """OSError where the kernel takes no filter."""
    filters = program(platform.machine())
    call = ctypes.CDLL(None, use_errno=True).prctl
    wanted = Program(len(filters) // 8, filters)
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(wanted), 0, 0)):
        if call(*arguments):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
