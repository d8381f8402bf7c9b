// Package secret makes all that the workers of a job need to know each other from one text that all of them were given: the job's
// secret.
//
// [New] makes a secret, [Parse] and [FromEnvironment] take one that was handed over. From it every worker derives, by HKDF
// (RFC 5869):
//
//   - [Secret.TLS]: an authority of the job and a certificate of its own, for mutual TLS 1.3 between hosts;
//   - [Secret.Authenticate]: a challenge by HMAC each way, for connections that are not encrypted, and inside of those that are;
//   - [Secret.Token]: keys for other purposes, such as the proof between processes that share memory.
//
// Nothing of it is configured, exchanged or stored: whoever has the secret belongs to the job, and nobody else does. What
// this protects against, and what not, is in docs/security.md.
package secret
