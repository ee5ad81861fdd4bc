"""Area under the ROC curve and mean average precision of several labels; 10 lines are for dualeval.

    python examples/multilabel.py
    torchrun --nproc-per-node 2 examples/multilabel.py
    horovodrun -np 2 python examples/multilabel.py
    dualeval run --task examples/multilabel.py:digits --nproc 2 --out runs/digits

scikit-learn computes both from all samples together, in data-set order. If it is killed or stopped, type
the same command again to resume. Needs scikit-learn.
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import Ridge
from sklearn.metrics import average_precision_score, roc_auc_score
from torch.utils.data import TensorDataset

import dualeval
from dualeval.metrics import Rows

# -- model and data: is a written digit even, prime, has it a loop? Fitted to 900, evaluated on 897 ------

x, digit = load_digits(return_X_y=True)
y = np.stack([np.isin(digit, kind) for kind in ([0, 2, 4, 6, 8], [2, 3, 5, 7], [0, 6, 8, 9])], axis=1)
fitted = Ridge().fit(x[:900], y[:900])
lines = torch.nn.Linear(64, 3).eval()
# Rounded, they are the same bits, however many threads have fitted them.
weights = {"weight": fitted.coef_.round(4), "bias": fitted.intercept_.round(4)}
lines.load_state_dict({name: torch.tensor(values) for name, values in weights.items()})
pictures = TensorDataset(torch.tensor(x[900:]).float(), torch.tensor(y[900:]))

# -- for dualeval ----------------------------------------------------------------------------------------

metrics = [
    Rows(roc_auc_score, ["target", "prediction"], name="auroc", higher_is_better=True),
    Rows(average_precision_score, ["target", "prediction"], name="map", higher_is_better=True),
]
digits = dualeval.ModelTask(model=lines, data=pictures, metrics=metrics, name="digits")
if __name__ == "__main__":
    print(dualeval.evaluate(digits, out="runs/multilabel").metrics)
