"""A release from another machine, over ssh: the sparkpin there writes the folder of a layout, and rsync brings of it
what this machine lacks. From then on it is the import of a folder, which believes the other machine nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import subprocess
from subprocess import PIPE

from sparkpin.core import files, locks
from sparkpin.core.errors import IntegrityError, NetworkError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import count, say
from sparkpin.distribute import layout, transfer
from sparkpin.distribute.bundle import Bundle
from sparkpin.host.engine import Engine
from sparkpin.host.ssh import ssh_command, unexpected
from sparkpin.image import oci
from sparkpin.releases import remote

# The folder there goes when this end of the connection does, however it ends.
EXPORT = """\
folder=$(mktemp -d "${{TMPDIR:-/var/tmp}}/sparkpin-XXXXXX") && trap 'rm -rf "$folder"' EXIT &&
{program} export {tag} "$folder/layout/" >&2 && echo "$folder/layout/" && cat "$folder/layout/manifest.json" && echo &&
cat >&2"""


def pull(paths: Paths, engine: Engine, url: str, tag: str, *, signed: bool = False) -> Bundle:
    """Export there, fetch and import. What came of a run that was killed stays, and the next one goes on with it.

    tag: of the release there; signed: as of `import_bundle`. InputError for no such place, NetworkError where ssh or
    the export there fails, and what an import raises.
    """
    host, checkout = remote.host_of(url), url.removeprefix(remote.host_of(url))
    program = f"{checkout}/.venv/bin/sparkpin" if checkout else "sparkpin"
    script = EXPORT.format(program=shlex.quote(program), tag=shlex.quote(tag))
    folder = paths.work / f"pull-{hashlib.sha256(f'{url} {tag}'.encode()).hexdigest()[:12]}"
    with locks.claim(paths), files.lock(paths.locks / f"{folder.name}.lock", on_wait="another run is at it; waiting"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with subprocess.Popen(ssh_command(host, script), stdin=PIPE, stdout=PIPE) as process:
            assert process.stdout
            there, manifest = process.stdout.readline(4096).decode(errors="replace").strip(), process.stdout.readline()
            if not manifest:
                step = f"see above; `ssh {host} {shlex.quote(program)} --help` has to work without a password"
                raise NetworkError(f"{url}: no sparkpin there has exported {tag}", next_step=step)
            if not re.fullmatch(r"/\S+/sparkpin-\w+/layout/", there):
                raise unexpected(host, there, "the folder of the export")
            with layout.refusing(url):
                names = [name for name in json.loads(manifest)[0]["Layers"] if layout.BLOB.fullmatch(name)]
            diff_ids = [f"sha256:{name[-64:]}" for name in names]
            have = {*diff_ids} - transfer.lacking_layers(paths, engine, diff_ids)
            say(f"fetching what lacks of it; {count(len(have), 'layer')} are here")
            for name in (oci.INDEX, oci.ARCHIVE_MANIFEST):  # others may have the same size
                (folder / name).unlink(missing_ok=True)
            words = ["-rt", "--partial", "--size-only", "--delete", *(f"--exclude=/{oci.blob(one)}" for one in have)]
            remote.rsync(url, *words, remote.at(url, there), str(folder))
        try:
            bundle = transfer.import_bundle(paths, engine, folder, signed=signed, without=have)
        except IntegrityError:
            shutil.rmtree(folder)  # rsync goes by sizes, and would leave what is damaged
            raise
        shutil.rmtree(folder)
    return bundle
