"""What a script logged to wandb, read back from the files that wandb wrote."""

import json
import os
import struct
from collections import namedtuple

QUIET = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "WANDB__DISABLE_STATS": "true"}

Run = namedtuple("Run", "id group x_axes history")


def records(path):
    """The records in a .wandb file: protobufs in LevelDB's log format, blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, record = path.read_bytes(), 7, b""  # 7: the file's own header
    while position + 7 <= len(data):
        room = 2**15 - position % 2**15
        if room < 7:  # too little for a header: the rest of the block is padding
            position += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += 7 + length
        record += data[position - length : position]
        if kind in (1, 4):  # a whole record or the last part of one
            yield Record.FromString(record)
            record = b""


def read_runs(folder):
    """All runs that wandb wrote in `folder`, in order of time."""
    runs = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=os.path.getctime):
        x_axes, history = {}, []
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                id, group = record.run.run_id, record.run.run_group
            elif kind == "metric":
                x_axes[record.metric.glob_name or record.metric.name] = record.metric.step_metric
            elif kind == "history":
                items = record.history.item
                keys = (item.key or item.nested_key[0] for item in items)
                values = (json.loads(item.value_json) for item in items)
                history.append(dict(zip(keys, values, strict=True)))
        runs.append(Run(id, group, x_axes, history))
    return runs
