"""Speed of the tokenize stage: `python benchmarks/tokenize.py [--quick]`; what is measured is in tokenizing.py.

Python puts a script's folder first on the path, so that this file would stand in for the standard library's module
`tokenize` in every benchmark of this folder. Imported under that name it therefore hands over to the real one.
"""

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != HERE]

if __name__ == "__main__":
    import runpy

    runpy.run_path(os.path.join(HERE, "tokenizing.py"), run_name="__main__")
else:
    import importlib

    del sys.modules[__name__]
    sys.modules[__name__] = importlib.import_module(__name__)
    sys.path.insert(0, HERE)
