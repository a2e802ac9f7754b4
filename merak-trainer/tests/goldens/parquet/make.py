"""Writes the Parquet files of the tests, and the same records as JSON lines.

python make.py, with pyarrow 26.0 (any version will do: the records count, not the bytes).
"""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

FOLDER = Path(__file__).parent

TEXTS = [
    {"text": f"every rank waits for its peer, {number} times \u2014 gr\u00f6\u00dfer", "label": number % 3, "score": number / 4}
    for number in range(40)
]
TEXTS[7]["score"] = None

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {number} + {number}?"},
            {"role": "assistant", "content": f"{2 * number}"},
        ]
    }
    for number in range(12)
]


def write(name: str, records: list, **options) -> None:
    pq.write_table(pa.Table.from_pylist(records), FOLDER / f"{name}.parquet", **options)
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    (FOLDER / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


# Two row groups each, by the two compressions that data sets use.
write("texts", TEXTS, compression="snappy", row_group_size=25)
write("chats", CHATS, compression="zstd", row_group_size=7)
