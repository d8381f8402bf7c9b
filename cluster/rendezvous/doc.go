// Package rendezvous implements the rendezvous of a job's workers: a small key-value store that all workers
// share, and the coordination primitives built on it.
//
// # Stores
//
// A [Store] is a map from keys to values. Every change has a revision, and callers can wait for changes.
// Three stores are built in: the TCP server started by [Serve] ("tcp://host:port") and a shared folder
// ("file:///folder"), both opened by URL with [Open], and the memory of one process ([Memory]). Package cluster/etcd
// adds etcd; other stores are added the same way, with [Config.Schemes]. Package storetest is the conformance suite.
//
// # Rendezvous
//
// Each worker calls [Join] with its [Registration]. Join returns all registrations once all workers have joined, or the
// same error to every worker: which worker is missing, joined twice, or does not belong to the job. Then the workers
// exchange data ([Exchange]) and compare settings that must be equal ([Compare]). During training each worker publishes
// a [Heartbeat] repeatedly, and watches those of the others ([Publish], [Watch]). At the end they [Leave].
//
//	store, err := rendezvous.Open(ctx, "tcp://10.0.0.1:29500", rendezvous.Config{})
//	…
//	registrations, err := rendezvous.Join(ctx, store, rendezvous.Registration{Job: "digits", Worker: 1, Workers: 4})
//
// All keys of a job start with "<job>/<epoch>/" ([Key]), so that jobs do not interfere and an epoch does not
// see keys of earlier epochs. docs/rendezvous.md specifies the protocol, the keys and the guarantees.
package rendezvous
