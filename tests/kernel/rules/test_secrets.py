"""Which names hide their values, and that these are nowhere in what is shown."""

from __future__ import annotations

import pytest

from ddp_runner.config.fields import known_fields
from ddp_runner.kernel.rules.errors import BadInputError
from ddp_runner.kernel.rules.secrets import (
    HIDDEN,
    is_secret,
    masked,
    masked_words,
    secret_texts,
    without_secrets,
)

SECRET = "hunter2-and-more"


def test_a_name_with_such_a_word_hides_its_value():
    """In any case, whatever separates the words, alone or behind a section or a file."""
    for name in [
        *("key", "KEY", "api_key", "task.api-key", "apiKey", "OPENAI_API_KEY", "wandb_apikey"),
        *("token", "hf_token", "hfToken", "HFTOKEN", "task.auth.token", "token_2", "api_keys"),
        *("secret", "client_secret", "mySecretValue", "secrets", "password", "db_passwords"),
        *("run.yaml: task.key", "DDP_RUNNER_TASK__API_KEY", "--hf-token", "key_path", "passwd"),
    ]:
        assert is_secret(name, SECRET)
        assert masked({name: SECRET}) == {name: HIDDEN}
        error = BadInputError(name, SECRET, "must be another one")
        assert SECRET not in f"{error} {error.value} {error.args}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("tokenizer", "gpt2"), ("keyboard", "de"), ("keep_last", 3), ("keypoints", 17)),
        *(("max_tokens", 512), ("n_keys", 8), ("/home/key/run.yaml: width", 5), ("secretary", 1)),
    ],
)
def test_a_name_that_only_looks_alike_hides_nothing(name, value):
    """What names a tokenizer or the number of tokens is wanted in the files. (A secretary is hidden.)"""
    assert is_secret(name, value) is (name == "secretary")


def test_no_setting_of_our_own_is_hidden():
    """They are all public, so that a file of settings can be read again."""
    assert [key for key in known_fields() if is_secret(key, "x")] == []


def test_secrets_in_mappings_and_lists_are_found():
    """However deep, and nothing else is touched."""
    value = {"url": "x", "login": {"password": SECRET, "user": "me"}, "all": [{"token": SECRET}, 1]}
    shown = {"url": "x", "login": {"password": HIDDEN, "user": "me"}, "all": [{"token": HIDDEN}, 1]}
    assert masked(value) == shown
    assert set(secret_texts(value)) == {SECRET}
    assert masked({"key": "", "token": None}) == {"key": "", "token": None}


def test_command_lines_are_shown_without_them():
    """Attached or behind, as an option or a setting, or inside a mapping."""
    words = [
        *("-b", "8", f"task.api_key={SECRET}", f"--task.token={SECRET}", "--task.key", SECRET),
        *("--lr", "1", f"task.login={{user: me, password: {SECRET}}}", "task.width=4", "a=b=c"),
    ]
    shown = " ".join(masked_words(words))
    assert SECRET not in shown
    assert shown == (
        "-b 8 task.api_key=*** --task.token=*** --task.key *** "
        "--lr 1 task.login=*** task.width=4 a=b=c"
    )


def test_secrets_in_the_words_of_others_are_replaced():
    """The longest first; nothing so short that it would be everywhere."""
    secrets = secret_texts({"key": "abcd", "token": "abcdef", "password": "1", "width": "text"})
    assert without_secrets("abcdef, abcd, 1, text", secrets) == "***, ***, 1, text"
