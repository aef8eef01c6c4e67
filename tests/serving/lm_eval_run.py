"""Runs lm_eval on the tasks beside this file, for test_lm_eval.py, by the Python that has lm_eval.

Arguments: a list of runs as JSON, and the file for their results, as JSON too. A run is ``model``, ``model_args``,
``tasks`` and ``chat``; its results are the metrics of each task, and each sample's answers.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

TASKS = Path(__file__).parent / "lm_eval_tasks"


def main() -> None:
    os.chdir(TASKS)  # where the tasks' data is
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    results = []
    for run in json.loads(sys.argv[1]):
        found = simple_evaluate(
            model=run["model"],
            model_args=run["model_args"],
            tasks=run["tasks"],
            apply_chat_template=run["chat"],
            task_manager=manager,
            bootstrap_iters=0,
            device="cpu",
        )
        metrics = {
            task: {name: value for name, value in of.items() if "," in name} for task, of in found["results"].items()
        }
        answers = {
            task: [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
            for task, samples in found["samples"].items()
        }
        results.append({"metrics": metrics, "answers": answers})
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
