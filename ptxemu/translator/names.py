"""PTX names as C++ identifiers."""

import re


def identifier(name):
    return re.sub(r"\W", "_", name.replace("$", "_S_").replace("%", ""))
