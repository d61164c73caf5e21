"""lm-eval: a task of its own with log likelihoods and one with generations, 8 requests at once."""

import json
import tempfile
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from tried import KEY, MODEL, URL, run

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
{rest}
"""
CHOICE = 'doc_to_choice: ["yes", "no"]\ndoc_to_target: 0\nmetric_list: [{metric: acc}]'
WRITE = 'doc_to_target: "yes"\ngeneration_kwargs: {until: ["."], max_gen_toks: 12, do_sample: false}'
ARGUMENTS = {
    "model": MODEL,
    "base_url": f"{URL}/v1/completions",
    "tokenizer": str(Path(__file__).parents[3] / "src" / "weft" / "default_model"),
    "num_concurrent": 8,
    "max_retries": 1,
    "max_length": 2048,
}


def evaluate(kind: str, rest: str) -> None:
    import os

    os.environ["OPENAI_API_KEY"] = KEY
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data.json")
        data.write_text("\n".join(json.dumps({"question": f"Is {number} a number?"}) for number in range(12)))
        Path(folder, "task.yaml").write_text(TASK.format(name=f"own_{kind}", data=data, kind=kind, rest=rest))
        manager = TaskManager(include_path=folder, include_defaults=False)
        found = simple_evaluate("local-completions", ARGUMENTS, tasks=[f"own_{kind}"], task_manager=manager, limit=12)
    assert found is not None
    assert f"own_{kind}" in found["results"]


def likelihoods() -> None:
    evaluate("multiple_choice", CHOICE)


def generations() -> None:
    evaluate("generate_until", WRITE)


run(likelihoods, generations)
