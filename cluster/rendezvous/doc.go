// Package rendezvous is where the workers of a job meet: a small store that all of them reach, and what is built on it.
//
// # Stores
//
// A [Store] is a map from keys to values whose changes have revisions and can be waited for. There are three here: the server that
// [Serve] starts ("tcp://host:port") and a folder that all workers reach ("file:///folder"), which [Open] opens by their URLs, and the
// memory of one process ([Memory]). Others are plugged in by [Config.Schemes]; [Open] has one for etcd, and so has the module cluster/etcd. Package storetest
// is the conformance suite.
//
// # Meeting
//
// Each worker makes a [Card] and calls [Meet], which returns all cards when all have come, or the same error to all of them:
// who is missing, who is there twice, who is a stranger. Then they tell each other things ([Exchange]), wait for each other
// ([Barrier]) and hold against each other what must be equal ([Compare]). While they work, each publishes a [Pulse] and
// watches those of the others ([Publish], [Watch]). At the end they [Leave].
//
//	store, err := rendezvous.Open(ctx, "tcp://10.0.0.1:29500", rendezvous.Config{})
//	…
//	cards, err := rendezvous.Meet(ctx, store, rendezvous.Card{Job: "digits", Worker: 1, Workers: 4})
//
// The keys of a job lie under "<job>/<epoch>/" ([Key]), so that jobs do not disturb each other and an epoch does not see what
// an earlier one has left behind. The protocol, the keys and what is promised stand in docs/rendezvous.md.
package rendezvous
