// Package secret makes all that the workers of a job need to know each other from one shared secret: certificates for mutual TLS,
// the challenge of connections on one host, and tokens.
package secret
