"""The default task: real text in, bits per byte and a sample out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from ddp_runner.core.settings import DataSettings, ModelSettings, RunSettings, Settings
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.tasks.bytes_lm import BytesTask
from ddp_runner.training.task import NamesLoss, ReportsSample, TakesSettings, Task

if TYPE_CHECKING:
    from ddp_runner.tasks.bytes_lm import ByteWindows


def task(
    path: object = "", *, seed: int = 5, seq_len: int = 32, fraction: float = 0.2
) -> BytesTask:
    shape = ModelSettings(seq_len=seq_len, hidden_size=32, num_layers=1, num_heads=2, dropout=0.0)
    data = DataSettings(path=str(path), validation_fraction=fraction)
    return BytesTask(Settings(run=RunSettings(seed=seed), model=shape, data=data))


@pytest.fixture
def folder(tmp_path):
    """Ten text files of 2,000 bytes and one that is not text."""
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(f"{number}: the quick brown fox.\n" * 80)
    (tmp_path / "picture.bin").write_bytes(b"\x89PNG\x00\x00" * 100)
    return tmp_path


def test_it_is_a_task_like_a_users():
    """The built-in task satisfies the public protocols."""
    made = task()
    for protocol in (Task, NamesLoss, ReportsSample, TakesSettings):
        assert isinstance(made, protocol)


def first_digits(dataset: ByteWindows) -> set[str]:
    """Which of the fixture's files a dataset reads: each line of a file begins with its number."""
    text = bytes(torch.cat(dataset.__getitems__(range(len(dataset)))).tolist()).decode()
    return set(filter(str.isdigit, text))


def test_folder_becomes_windows_of_its_text(folder):
    """Every sample is seq_len + 1 bytes of the files, and no file is in both splits."""
    data = task(folder).build_datasets()
    assert data.train[0].shape == (33,)
    assert bytes(data.train[0].tolist()) in b"".join(p.read_bytes() for p in folder.glob("*.txt"))
    train, validation = first_digits(data.train), first_digits(data.validation)
    assert train | validation == set("0123456789")
    assert len(validation) == 2
    assert not train & validation


def test_notes_count_what_was_read_and_skipped(folder):
    """A person sees how much text there is and that the binary file was left out."""
    notes = " ".join(task(folder).build_datasets().notes)
    assert "10 text files" in notes
    assert "skipped 1 binary" in notes
    assert "0.02 MB to train on" in notes


def test_fingerprint_names_the_data(folder):
    """The same files give the same fingerprint, one byte more another one."""
    before = task(folder).build_datasets().fingerprint
    assert task(folder).build_datasets().fingerprint == before
    with (folder / "3.txt").open("a") as file:
        file.write("x")
    assert task(folder).build_datasets().fingerprint != before


def test_single_file_is_enough(folder):
    """``--data FILE`` is split by position."""
    data = task(folder / "1.txt").build_datasets()
    assert len(data.train) > len(data.validation) > 0


def test_standard_library_is_the_default_text():
    """Without a path there are megabytes of Python, on any machine."""
    data = task(seq_len=128).build_datasets()
    assert len(data.train) > 10_000
    assert len(data.validation) > 100


def test_missing_data_is_the_users_to_fix(tmp_path):
    """The error names ``--data`` and the path."""
    with pytest.raises(BadInputError, match="--data") as caught:
        task(tmp_path / "absent").build_datasets()
    assert str(tmp_path / "absent") in str(caught.value)


@pytest.mark.parametrize(
    ("fraction", "purpose"), [(0.9999999, "train"), (0.9995, "train"), (1e-9, "validate")]
)
def test_a_split_that_leaves_no_sample_is_refused_by_its_name(folder, fraction, purpose):
    """Not the data is too small: the share is. The control is a share that leaves one sample."""
    with pytest.raises(BadInputError) as caught:
        task(folder, fraction=fraction).build_datasets()
    assert str(caught.value).startswith(f"data.validation_fraction={fraction}: leaves ")
    assert f"bytes to {purpose} on, and one sample takes 33" in str(caught.value)
    assert len(task(folder, fraction=0.99).build_datasets().train) > 0


def test_untrained_loss_is_eight_bits_per_byte(folder):
    """A model that knows nothing needs a byte for a byte."""
    made = task(folder)
    torch.manual_seed(0)
    data = made.build_datasets().train
    loss = made.loss(made.build_model(), torch.stack(data.__getitems__(range(16))))
    assert made.figures(loss.item())["bits_per_byte"] == pytest.approx(8, abs=0.3)
    assert made.figures(math.log(2)) == {"bits_per_byte": 1.0}


def test_sample_is_printable_and_repeats():
    """The same weights and seed write the same text, which a terminal can show."""
    torch.manual_seed(0)
    made = task()
    model = made.build_model().eval()
    text = made.sample(model)
    assert text.startswith("def ")
    assert text == made.sample(model)
    assert text != task(seed=6).sample(model)
    assert all(c.isprintable() or c in "\n\t" for c in text)
    assert 100 < len(text) <= 204


def test_sample_of_other_text_starts_a_line(folder):
    """The prompt of the standard library says nothing about a user's own text."""
    made = task(folder)
    assert made.sample(made.build_model().eval()).startswith("\n")


def test_outputs_for_predict_are_the_likeliest_bytes(folder):
    """One for each byte that the loss counts; the model alone cannot take a whole window."""
    made = task(folder)
    model = made.build_model().eval()
    batch = torch.stack([made.build_datasets().validation[at] for at in range(3)])
    assert torch.equal(made.predict(model, batch), model(batch.long()[:, :-1]).argmax(-1))
