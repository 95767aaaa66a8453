"""`serve`: what cannot be served is said before a model is loaded."""

import pytest


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--api-key-file", "missing.txt"), "missing.txt"),
        (("--api-key-file", "empty.txt"), "empty.txt"),
        (("--api-key-file", "key.txt", "--api-key", "another"), "--api-key"),
        (("--fp8",), "--fp8 needs a GPU"),
        (("--adapter", "a=x", "--adapter", "a=y"), "--adapter a=y: needs NAME=FOLDER"),
        (("--port", "0"), "port"),
    ],
)
def test_what_cannot_be_served_is_one_line(tilewright, place, words, match):
    (place / "empty.txt").write_text("\n")
    (place / "key.txt").write_text("secret\n")
    done = tilewright("serve", "no_such_model", *words, "--device", "cpu")
    assert done.exit_code == 2
    assert match in done.stderr
    assert "no_such_model" not in done.stderr, "the model is not looked for"
