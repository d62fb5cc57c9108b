"""Write the vectors of tests.reference's texts by sentence-transformers, with which those of the packaged model agree.

Run `PYTHONPATH=. python tests/data/packaged/make.py`; tests/contract/test_references_agree.py compares them.
"""

import numpy as np

from tests.reference import PROMPTED, STORED, TEXTS, packaged_reference

if __name__ == "__main__":
    vectors = packaged_reference().encode([*TEXTS, *PROMPTED], show_progress_bar=False)
    np.save(STORED, vectors.astype(np.float16))  # far below any tolerance: a cosine changes by 1e-7
