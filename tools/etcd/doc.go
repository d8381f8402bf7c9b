// Package etcd runs the store of package cluster/etcd, and jobs on it, with a real etcd server. It has tests only, and
// is a separate module because the server has many dependencies.
package etcd
