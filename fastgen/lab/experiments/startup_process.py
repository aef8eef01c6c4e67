"""The process that :mod:`fastgen.lab.experiments.startup` times: it prints a line of JSON when each phase has ended."""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not be taken for a report

    def report(**fields: str) -> None:
        print(json.dumps(fields), file=reports, flush=True)

    import fastgen
    from fastgen.errors import FastgenError
    from fastgen.lab.experiments.startup import NUM_PROMPT_TOKENS

    report(phase="imported")
    try:
        with fastgen.load(**json.loads(sys.argv[1])) as llm:
            report(phase="loaded")
            prompt = [token % llm.spec.vocab_size for token in range(1, NUM_PROMPT_TOKENS + 1)]
            llm.generate(prompt, max_new_tokens=1, ignore_eos=True)
            report(phase="first_token")
    except FastgenError as error:
        report(error=str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
