"""What the documents promise about themselves: short, complete, and no reference into nothing."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import socket
import subprocess
import sys
from functools import cache

import pytest

from ddp_runner.__main__ import main
from tests.scenarios.harness import ROOT
from tests.test_layout import parsing, tree_of

_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_CODE = re.compile(r"`([^`\n]+)`")
_FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_MODULE = re.compile(r"[\w./-]+\.(?:py|toml|yml|txt|md|sh)")
_UNSHIPPED = re.compile(r"\b(DESIGN|STYLE|SCENARIOS|HOUSE|FACTS|BRIEF)(\.md|\b section| \d)")
# Words of this project's own that nobody else knows. A rank is told to do a thing, and compare_samples has
# the value tell: those stay.
_OWN_WORDS = re.compile(
    r"((?<![A-Za-z])m|M)end(ed|er|ing|s)?(?![a-z])"
    r"|(?<![A-Za-z])([Rr]emed(y|ies)|[Aa]new|[Uu]ntold|[Tt]ells|[Tt]old(?!\s+to\b))(?![a-z])"
    r"|(?<![A-Za-z=\".])tell(?=[ _(])"
    r"|condemned|doomed|in peace|other.course"
)
_OLD_LOGS = {"restart_log.py", "test_restart_log.py"}  # they read what an older version wrote
# Files that a run or a reader makes, and what the text says is not there.
_MADE_BY_READERS = {"my.py", "product.py", "my_task.py", "task.py", "random.py", "requirements.txt"}
_OF_TORCH = {"SyncBatchNorm"}
_OF_OTHERS = {"test_model", "test_batch_size"}  # settings, not tests
WORDS_MAX = {"README.md": 900, "ARCHITECTURE.md": 1550}  # without code
_MADE = "<!-- Made by docs/generate.py"  # what follows is made from the code's tables
_SENTENCE_END = re.compile(r"(?<=[.!?])[)\"*]*\s+(?=[*\[(\"`A-Z0-9])")
LINE_MAX, WORDS_OF_A_SENTENCE_MAX, WORDS_OF_A_CELL_MAX = 150, 25, 25
# Clauses as subjects, and words that an English reader stumbles over: there are before, while, next to, resume.
_STUMBLE = re.compile(
    r"(?-i:(?:^|[.;:|] )(?:What|Whoever|Whom?|Whose|That which)\b(?![^.]*\?))"
    r"|\b(?:whoever|amid|for ever|as ever|so many|none such|the begin|gone on|go(?:es)? on (?:with|from)"
    r"|(?:is|are) to be|beside (?:the|training|backward)|of (?:its|their|one's|your) own(?=[.,;:)]|$)"
    r"|comes? to (?:the|an) end)\b",
    re.IGNORECASE,
)


def documents():
    return [
        *sorted(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),
        *sorted(path for path in (ROOT / "docs").rglob("*.md")),
    ]


def ours(*suffixes):
    """Every file of ours with one of these suffixes."""
    rooms = ("ddp_runner", "tests", "benchmarks", "docs", ".ci")
    found = [path for room in rooms for path in (ROOT / room).rglob("*")]
    return sorted(
        path for path in found if path.suffix in suffixes and "__pycache__" not in path.parts
    )


@cache
def names_in_code():
    """Every word of the code, and every name of a test."""
    words, tests = set(), set()
    for path in ours(".py"):
        text = path.read_text(encoding="utf-8")
        words.update(re.findall(r"\w+", text))
        tests.update(re.findall(r"def (test_\w+)", text))
    return words, tests


@pytest.mark.parametrize(("name", "words_max"), WORDS_MAX.items())
def test_front_documents_stay_short(name, words_max):
    """A page that grows is read by nobody: what is longer belongs into docs/."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert len(_FENCED.sub("", text).split()) <= words_max


def prose_of(text):
    """Return what is written by hand in a page, without code blocks and comments."""
    text = text.partition(_MADE)[0]
    text = _FENCED.sub("\n", text)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def blocks_of(lines):
    """Yield each paragraph and each item of a list as one line, without headings and tables."""
    block = []
    for line in [*lines, ""]:
        words = line.strip()
        is_item = re.match(r"- |\d+\. ", words)
        if not words or is_item or words.startswith(("#", "|", "![")):
            yield " ".join(block)
            block = []
        if words and not words.startswith(("#", "|", "![")):
            block.append(words.removeprefix(is_item[0]) if is_item else words)


def words_of(text):
    """Return the number of words; a piece of code is one, and a link is its text."""
    text = re.sub(r"\]\([^)]*\)", "", re.sub(r"`[^`]*`", "code", text))
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def not_plain_in(text):
    """Yield each line, cell of a table and sentence of a page that is too long, and each stumble."""
    lines = prose_of(text).splitlines()
    for line in lines:
        if not line.startswith("|") and len(line) > LINE_MAX:
            yield f"{len(line)} characters: {line}"
        for cell in line.split(" | ") if line.startswith("|") else ():
            if words_of(cell) > WORDS_OF_A_CELL_MAX:
                yield f"{words_of(cell)} words in a cell: {cell}"
    for block in [*blocks_of(lines), *(line for line in lines if line.startswith("|"))]:
        if stumble := _STUMBLE.search(re.sub(r"`[^`]*`", "code", block)):
            yield f"{stumble[0]}: {block}"
    for block in blocks_of(lines):
        for sentence in _SENTENCE_END.split(block):
            if words_of(sentence) > WORDS_OF_A_SENTENCE_MAX:
                yield f"{words_of(sentence)} words: {sentence}"


def test_lines_sentences_and_cells_of_a_page_are_short_and_plain():
    """A sentence is read once, and a table at a glance."""
    for path in documents():
        assert list(not_plain_in(path.read_text(encoding="utf-8"))) == [], path


def test_long_lines_sentences_and_cells_are_found():
    """Control: of each kind one that is too long, and its like in code or one word shorter."""
    words = " ".join(["a"] * 25)
    code = f"```\n{'x' * 151}\n{words} a.\n```\n"
    short = f"- {words}. `{words}`\n  and [{words[:-4]}](a.md).\n\n| {words} | {words} |\n\n"
    assert list(not_plain_in(f"# {words} a\n{code}{short}{_MADE} -->\n{words} a.\n")) == []
    long = f"{words}\na. Then.\n\n| a | {words} a |\n\n{'x' * 151}\n\nWhat it is\ntold. So many."
    kinds = [one.partition(":")[0] for one in not_plain_in(long)]
    assert kinds == ["26 words in a cell", "151 characters", "What", "26 words"]


def test_links_and_names_in_documents_lead_somewhere():
    """Each link, file, test, class and message that a document names is there."""
    for path in documents():
        text = _FENCED.sub("", path.read_text(encoding="utf-8"))
        links = [link for link in _LINK.findall(text) if "://" not in link]
        assert [link for link in links if not (path.parent / link).exists()] == [], path
        words, tests = names_in_code()
        lost = []
        for code in _CODE.findall(text):
            if _MODULE.fullmatch(code) and code not in _MADE_BY_READERS:
                folders = (ROOT, ROOT / "ddp_runner", path.parent)
                if not any((folder / code).exists() for folder in folders):
                    lost.append(code)
            elif (re.fullmatch(r"test_\w+", code) and code not in tests | _OF_OTHERS) or (
                (camel := re.fullmatch(r"([A-Z][a-z]+\w*)(\(.*\))?(\.\w+)*", code))
                and not ({*re.findall(r"\w+", camel[1])} <= words | _OF_TORCH)
            ):
                lost.append(code)
        assert lost == [], path


def test_each_page_is_in_the_menu_under_its_title():
    """Who follows a link finds the page again in the menu."""
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    entries = {
        file: title for title, file in re.findall(r"^ +- (.+): (\S+\.md)$", menu, re.MULTILINE)
    }
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert entries.keys() == pages
    for file, title in entries.items():
        first = (ROOT / "docs" / file).read_text(encoding="utf-8").splitlines()[0]
        assert first == f"# {title}"


def test_nothing_refers_to_a_document_that_does_not_ship():
    """Who reads "section 5 of the design" must have the design."""
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in [*documents(), *ours(".py", ".sh")]
        if path.name != "test_documents.py"
        for match in _UNSHIPPED.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_no_word_is_this_project_s_own():
    """A fault is repaired, a message reported, a run started fresh: in names, texts and prose."""
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in [*documents(), *ours(".py", ".sh")]
        if path.name not in {"test_documents.py", *_OLD_LOGS}
        for match in _OWN_WORDS.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def texts_in_code():
    """The texts of the package as they are printed: what is put into one is ``...``."""
    for path in ours(".py"):
        if path.parts[len(ROOT.parts)] != "ddp_runner":
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(
                    part.value if isinstance(part, ast.Constant) else "..." for part in node.values
                )


@parsing
def test_each_error_in_troubleshooting_is_printed_by_the_code():
    """Who searches for the words of an error finds them only if they are those words."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    heads = re.findall(r"^### (.*)$", page, re.MULTILINE)
    errors = [error for head in heads for error in _CODE.findall(head)]
    known = list(texts_in_code())
    assert len(errors) >= 25
    assert [error for error in errors if not any(error in text for text in known)] == []


def test_reference_pages_are_those_of_the_tables(monkeypatch):
    """Settings, options, faults and invariants in the documentation are those of the code."""
    place = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(place)
    monkeypatch.setitem(sys.modules, "generate", generate)
    place.loader.exec_module(generate)
    for name, page in generate.PAGES.items():
        written = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert written == page(), f"docs/{name}: run PYTHONPATH=. python docs/generate.py"


def test_site_is_built_without_a_warning(tmp_path):
    """Every page is reached, every link and every name of the Python API is found."""
    done = subprocess.run(
        [ROOT / "launch_training.sh", "docs", "--build", tmp_path / "site"],
        env={**os.environ, "DDP_RUNNER_PYTHON": sys.executable},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    for page in ("index", "settings", "python"):
        assert "<h1" in (tmp_path / "site" / f"{page}.html").read_text(encoding="utf-8")
    assert "launch" in (tmp_path / "site" / "python.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "said"),
    [(["docs", "--port", "web"], "--port=web: must be"), (["docs", "--bild"], "--build")],
)
def test_wrong_words_after_docs_are_one_line(words, said, capsys):
    """As of every command: what is wrong, what would be right, exit 2."""
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_folder_with_files_is_not_built_into(tmp_path, monkeypatch, capsys):
    """The builder would delete them."""
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "thesis.tex"
    kept.write_text("years of work")
    for given in (".", "thesis.tex", "thesis.tex/site"):
        assert main(["docs", "--build", given]) == 2
        assert f"--build={given}: must be a new or an empty folder" in capsys.readouterr().err
    assert kept.read_text() == "years of work"


def test_a_port_that_is_taken_is_refused_before_pages_are_built(capsys):
    """In one line."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert main(["docs", "--port", port]) == 2
    assert f"--port={port}: cannot be taken: Address already in use" in capsys.readouterr().err
