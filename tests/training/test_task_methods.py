"""A method of a task that nothing calls: named in one line, or refused where another trainer would call it."""

from __future__ import annotations

import textwrap

import pytest

from ddp_runner.core.settings import RunSettings, Settings
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.training.starting.task_import import load_task
from ddp_runner.training.task_methods import unused_methods

WHOLE = """
    def build_model(self): return None
    def build_datasets(self): return None
    def loss(self, model, batch): return None
"""


def task_of(tmp_path, methods, *, before="", base="", whole=WHOLE):
    file = tmp_path / "vis.py"
    file.write_text(f"{before}\nclass Vis{base}:\n{whole}\n{textwrap.indent(methods, '    ')}\n")
    return load_task(Settings(run=RunSettings(task=f"{file}:Vis")))


def refused(tmp_path, methods, **more):
    with pytest.raises(BadInputError) as caught:
        task_of(tmp_path, methods, **more)
    return str(caught.value)


@pytest.mark.parametrize("name", ["training_step", "validation_step", "forward", "build_optimizer"])
def test_what_another_trainer_would_call_ends_the_start(tmp_path, name):
    """Its writer counts on it."""
    message = refused(tmp_path, f"def {name}(self, *batch): pass")
    assert f"Vis.{name} is not used: " in message


@pytest.mark.parametrize(
    ("method", "hook"),
    [
        ("metric(self, model, batch)", "metrics"),
        ("build_metric(self)", "build_metrics"),
        ("figure(self, loss)", "figures"),
        ("layers_groups(self)", "layer_groups"),
    ],
)
def test_a_slip_in_the_name_of_a_hook_ends_the_start(tmp_path, method, hook):
    """The hook would never be called."""
    message = refused(tmp_path, f"def {method}: pass")
    assert message.endswith(f"is not used: did you mean {hook}?")


@pytest.mark.parametrize("name", ["on_epoch_end", "on_evaluation_end"])
@pytest.mark.parametrize("arguments", ["self", "self, context, more", "self, *, context"])
def test_a_hook_that_takes_no_context_ends_the_start(tmp_path, name, arguments):
    """Not the run, after its first epoch."""
    message = refused(tmp_path, f"def {name}({arguments}): pass")
    assert message.endswith(f"Vis.{name} must take (context)")


@pytest.mark.parametrize("hook", ["on_epoch_end = None", "def on_epoch_end(self, *given): pass"])
def test_a_hook_that_can_be_called_or_is_none_is_no_news(tmp_path, hook):
    assert unused_methods(task_of(tmp_path, hook)) == ()


@pytest.mark.parametrize("named", ["", ":Vis"])
def test_a_slip_in_a_method_that_must_be_there_is_named(tmp_path, named):
    """Beside what is missing."""
    file = tmp_path / "vis.py"
    file.write_text("class Vis:" + WHOLE.replace("build_datasets", "build_dataset"))
    with pytest.raises(BadInputError, match=r"Vis.build_dataset: did you mean build_datasets\?"):
        load_task(Settings(run=RunSettings(task=f"{file}{named}")))


@pytest.mark.parametrize("name", ["collate", "collate_fn"])
def test_a_collate_that_nothing_calls_has_one_line(tmp_path, name):
    """What a DataLoader would be given is an argument here."""
    task = task_of(tmp_path, f"@staticmethod\ndef {name}(samples): return samples")
    assert unused_methods(task) == (f"Vis.{name} is not used: give Datasets(collate=...)",)


def test_metrics_of_other_arguments_are_named(tmp_path):
    """They are not called."""
    task = task_of(tmp_path, "def metrics(self, outputs): return {}")
    assert unused_methods(task) == ("Vis.metrics is not used: it must take (model, batch)",)


@pytest.mark.parametrize(
    ("methods", "more"),
    [
        ("def forward(self, x): pass\ndef step(self): return self.forward(1)", {}),
        ("def collate(self, s): pass\ndef data(self): return dict(collate=self.collate)", {}),
        (
            "def training_step(self, x): pass\ndef all(self): return getattr(self, 'training_step')",
            {},
        ),
        ("def figure(self, axes, title): pass", {}),
        ("metric = 'accuracy'", {}),
        ("def _metric(self, model, batch): pass", {}),
        ("def metric(self, model, batch): pass\ndef metrics(self, model, batch): pass", {}),
        (
            "def training_step(self, batch): pass",
            {"before": "from torch import nn", "base": "(nn.Module)"},
        ),
    ],
    ids=["called", "given", "by name", "other arguments", "value", "own", "both", "module"],
)
def test_methods_that_something_uses_are_no_news(tmp_path, methods, more):
    """Control: called by the task itself, a helper with other arguments, a class that is another trainer's too."""
    assert unused_methods(task_of(tmp_path, methods, **more)) == ()


def test_a_method_that_a_base_class_elsewhere_calls_is_no_news(tmp_path, monkeypatch):
    """Control: a user's own base class in another file."""
    monkeypatch.syspath_prepend(str(tmp_path))
    base = WHOLE.replace("batch): return None", "batch): return self.forward(batch)")
    (tmp_path / "vis_base.py").write_text(f"class Base:{base}")
    task = task_of(
        tmp_path,
        "def forward(self, batch): return batch",
        before="from vis_base import Base",
        base="(Base)",
        whole="",
    )
    assert unused_methods(task) == ()
