"""Modules of the explorer's page are joined, or refused with the reason."""

import re

import pytest

from linbias.explore.bundle import bundle


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.js": 'import { x } from "./b.js";\n', "b.js": "const x = 1;\n"}, "a.js imports x, which b.js does not export"),
        (
            {"a.js": 'import { x } from "./b.js";\nconst y = 1;\n', "b.js": "export const x = 1;\nconst y = 2;\n"},
            "names must be unique, got y in b.js and a.js",
        ),
        (
            {"a.js": 'import { b } from "./b.js";\nexport const a = 1;\n', "b.js": 'import { a } from "./a.js";\nexport const b = 1;\n'},
            "modules must not import each other, got a.js -> b.js -> a.js",
        ),
        ({"a.js": 'import x from "y";\n'}, "a.js has a line that cannot be joined"),
        ({"a.js": "export default 1;\n"}, "a.js has a line that cannot be joined"),
        ({"a.js": "const { x } = y;\n"}, "a.js has a line that cannot be joined"),
        ({"a.js": "f('</script>');\n"}, "a.js has a line that cannot be joined"),
    ],
)  # fmt: skip
def test_modules_that_cannot_be_joined_are_refused(files, message):
    with pytest.raises(ValueError, match=re.escape(f"bundle: {message}")):
        bundle("a.js", files.__getitem__)
