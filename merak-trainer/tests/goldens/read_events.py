"""Prints what TensorBoard's own reader finds in a folder of event files, by tag, as JSON.

    python -m venv /tmp/tb && /tmp/tb/bin/pip install tensorboard
    TEST_TENSORBOARD=/tmp/tb/bin/python cargo test -p merak-trainer --test it -- reports

The test compares it with what its own reader finds.
"""

import json
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

accumulator = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
accumulator.Reload()
scalars = {
    tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
    for tag in accumulator.Tags()["scalars"]
}
json.dump(scalars, sys.stdout)
