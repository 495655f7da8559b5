"""Which safetensors files make up a checkpoint, and what tensors they hold; checked before a byte of them is used."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ktplan.artifact import read_json_object
from ktplan.errors import BadInput
from ktplan.model.header import TensorInfo, read_header, refuse_lfs_pointer

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NUMBERED = re.compile(r"(.*-)(\d{5})(-of-)(\d{5})(\.safetensors)")


def find_tensors(path: Path, root: Path) -> dict[str, TensorInfo]:
    """All tensors of the checkpoint at `path` (a file, or a folder with or without an index), by name."""
    if path.is_file():
        if path.suffix != ".safetensors":
            raise BadInput(
                f"{path} is not a safetensors file",
                hint="give a model folder, a .safetensors or a .gguf file",
            )
        return read_header(path).tensors
    index = root / _INDEX
    if index.is_file():
        return _indexed(root, index)
    if (root / _SINGLE).is_file():
        return read_header(root / _SINGLE).tensors
    files = sorted(root.glob("*.safetensors"))
    if not files:
        raise BadInput(f"{root} has no safetensors files", hint="give the folder that holds the weights")
    _refuse_gaps(root, files)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_header(file).tensors.items():
            if name in tensors:
                raise BadInput(
                    f"{root}: {name} is in {tensors[name].file.name} and in {file.name}, and there is no {_INDEX}",
                    hint="keep one model in the folder, or add its index",
                )
            tensors[name] = info
    return tensors


def _refuse_gaps(root: Path, files: list[Path]) -> None:
    """Without an index the numbers in the names tell whether a file is missing."""
    there = {file.name for file in files}
    for file in files:
        if found := _NUMBERED.fullmatch(file.name):
            before, _, of, count, after = found.groups()
            every = [f"{before}{n:05d}{of}{count}{after}" for n in range(1, int(count) + 1)]
            _refuse_absent(root, every, [name for name in every if name not in there], "numbered files")


def _refuse_absent(root: Path, wanted: list[str], absent: list[str], whose: str) -> None:
    if absent:
        more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
        raise BadInput(
            f"{root}: {len(absent)} of {len(wanted)} {whose} are missing: {', '.join(absent[:5])}{more}",
            hint="download the missing files",
        )


def _indexed(root: Path, index: Path) -> dict[str, TensorInfo]:
    """The index decides which file holds a tensor; other files in the folder are left alone."""
    refuse_lfs_pointer(index)
    places = read_json_object(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise BadInput(f"{index} has no weight_map", hint="download it again")
    for name, file in places.items():
        if not isinstance(file, str) or not file:
            raise BadInput(
                f"{index} names no file for {name} but {json.dumps(file)}", hint="download it again"
            )
    wanted = sorted(set(places.values()))
    absent = [name for name in wanted if not (root / name).is_file()]
    _refuse_absent(root, wanted, absent, f"files named in {_INDEX}")
    headers = {name: read_header(root / name).tensors for name in wanted}
    tensors: dict[str, TensorInfo] = {}
    for name, file in places.items():
        info = headers[file].get(name)
        if info is None:
            raise BadInput(
                f"{root / file} lacks {name}, which {_INDEX} places there", hint="download the file again"
            )
        tensors[name] = info
    return tensors
