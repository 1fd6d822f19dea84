# ranks: 2
# verdict: mismatched-calls
# call: broadcast_parameters
# within: 2
# ends: error
"""The vocabulary is built from each rank's own shard, so the embeddings differ in size."""

from torch import nn

import hora.torch as hora

hora.init()
corpus = "to be or not to be that is the question whether it is nobler in the mind to suffer"
shard = corpus.split()[hora.rank() * 9 :]
vocabulary = sorted(set(shard))
model = nn.Sequential(nn.Embedding(len(vocabulary), 8), nn.Linear(8, len(vocabulary)))
hora.broadcast_parameters(model)  # <- here
