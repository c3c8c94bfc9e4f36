"""Reads flash-attn's signatures and limits out of its source distribution into `flash_attn_signatures.json`.

Run it after changing VERSION: `python tests/model/attention/make_flash_attn_signatures.py`. It needs pip, torch and the
package index, but no compiler and no CUDA: nothing of the package is run but its metadata hook.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

VERSION = "2.8.3.post2"
"""The release that the flash backend is written against."""
FUNCTIONS = ("flash_attn_varlen_func",)
KERNEL = "mha_varlen_fwd"
"""The C++ entry of `flash_attn_varlen_func`, which checks its arguments."""
OUTPUT = Path(__file__).with_name("flash_attn_signatures.json")


def read_signatures() -> dict[str, Any]:
    """Downloads the source distribution and parses it. Raises CalledProcessError where it cannot be had."""
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", f"flash-attn=={VERSION}", "--quiet", "--dest", directory),
                *("--no-deps", "--no-build-isolation", "--no-binary", ":all:"),
            ],
            env=os.environ | {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"},
            check=True,
            capture_output=True,
            timeout=240,
        )
        (archive,) = Path(directory).glob("*.tar.gz")
        with tarfile.open(archive) as source:
            interface = _read(source, "flash_attn/flash_attn_interface.py")
            kernel = _read(source, "csrc/flash_attn/flash_api.cpp")
    definitions = {node.name: node for node in ast.parse(interface).body if isinstance(node, ast.FunctionDef)}
    body = kernel.split(f"{KERNEL}(")[1].split("\nmha_")[0]
    return {
        "package": "flash-attn",
        "version": VERSION,
        "signatures": {name: _parameters(definitions[name]) for name in FUNCTIONS},
        "checks": sorted(set(re.findall(r'TORCH_CHECK\([^;]*?"([^"]+)"\)', body))),
    }


def _read(archive: tarfile.TarFile, path: str) -> str:
    (member,) = (member for member in archive.getmembers() if member.name.split("/", 1)[-1] == path)
    file = archive.extractfile(member)
    assert file is not None
    return file.read().decode()


def _parameters(function: ast.FunctionDef) -> list[dict[str, str]]:
    """Name and, where there is one, default of each parameter; the default as Python writes it."""
    assert not function.args.kwonlyargs
    assert not function.args.posonlyargs
    names = [argument.arg for argument in function.args.args]
    defaults = [ast.unparse(default) for default in function.args.defaults]
    required = len(names) - len(defaults)
    return [
        {"name": name} if i < required else {"name": name, "default": defaults[i - required]}
        for i, name in enumerate(names)
    ]


if __name__ == "__main__":
    OUTPUT.write_text(json.dumps(read_signatures(), indent=1) + "\n")
    print(f"wrote {OUTPUT.name} from flash-attn {VERSION}")
