//go:build unix && !linux

package main

import "testing"

const hostsAddress = ""

// twoHosts are not supported here.
type twoHosts struct{}

func (*twoHosts) at(int) []string { return nil }

func openHosts(*testing.T) (*twoHosts, string) { return nil, "network namespaces are Linux'" }
