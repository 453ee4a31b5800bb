# Copyright The levanter-marin Authors
# SPDX-License-Identifier: Apache-2.0

"""The metrics file of a run."""

import json

from levanter_marin.tracker import JsonLinesConfig


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_json_lines_run_without_finish_leaves_every_record(tmp_path):
    config = JsonLinesConfig(output_dir=str(tmp_path))
    tracker = config.init("run")
    for step in range(3):
        tracker.log({"train": {"loss": 3.0 - step}}, step=step)

    records = read(config.path("run"))
    assert [(record["step"], record["metrics"]["train"]["loss"]) for record in records] == [
        (0, 3.0),
        (1, 2.0),
        (2, 1.0),
    ]


def test_json_lines_resume_after_torn_record_appends_whole_records(tmp_path):
    config = JsonLinesConfig(output_dir=str(tmp_path))
    config.init("run").log({"train/loss": 3.0}, step=0)
    with config.path("run").open("a") as file:
        file.write('{"event": "log", "step": 1, "metr')

    resumed = config.init("run")
    resumed.log({"train/loss": 2.0}, step=1)
    resumed.finish()

    records = read(config.path("run"))
    assert [record.get("step") for record in records] == [0, 1, None]
    assert records[-1]["summary"] == {"train/loss": 2.0}
