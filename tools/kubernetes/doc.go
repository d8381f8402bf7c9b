// Package kubernetes gives the manifests of lockstep render kubernetes to a kube-apiserver. It has tests only, and is
// a separate module because a kube-apiserver has 2,000 packages.
package kubernetes
