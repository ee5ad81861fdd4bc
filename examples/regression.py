"""Mean absolute error, root mean squared error and R2 of a fitted line; 11 lines are for dualeval.

    python examples/regression.py
    torchrun --nproc-per-node 2 examples/regression.py
    horovodrun -np 2 python examples/regression.py
    dualeval run --task examples/regression.py:diabetes --nproc 2 --out runs/diabetes

If it is killed or stopped, type the same command again to resume. Needs scikit-learn.
"""

import torch
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score
from torch.utils.data import TensorDataset

import dualeval
from dualeval.metrics import Mean, Rows

# -- model and data: a line is fitted to 300 patients, and the other 142 are evaluated -------------------

x, y = load_diabetes(return_X_y=True)
fitted = LinearRegression().fit(x[:300], y[:300])
line = torch.nn.Linear(10, 1).eval()
line.load_state_dict({"weight": torch.tensor(fitted.coef_[None]), "bias": torch.tensor([fitted.intercept_])})
patients = TensorDataset(torch.tensor(x[300:]).float(), torch.tensor(y[300:]).float())

# -- for dualeval ----------------------------------------------------------------------------------------

metrics = (
    Mean("absolute_error", name="mae", higher_is_better=False),
    Mean("squared_error", transform="sqrt", name="rmse", higher_is_better=False),
    Rows(r2_score, ["target", "prediction"], name="r2", higher_is_better=True),
)
diabetes = dualeval.ModelTask(model=line, data=patients, metrics=metrics, name="diabetes")
if __name__ == "__main__":
    print(dualeval.evaluate(diabetes, out="runs/regression").metrics)
